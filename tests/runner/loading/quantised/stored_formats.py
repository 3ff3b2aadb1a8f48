"""Writes random matrices in every format of quantised checkpoints, with NumPy, and says which
numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Fields = dict[str, Array | Tensor]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds


@dataclass(frozen=True)
class Format:
    """A format: how a matrix [rows, columns] is written, and what the config says of it."""

    write: Callable[[np.random.Generator, int, int], tuple[Fields, Array]]
    config: dict[str, Any]
    divisor: int = 1  # what columns must be a multiple of
    row_divisor: int = 1


def packed(codes: Array, bits: int) -> Array:
    """Codes [R, C] -> int32 [R, ceil(C bits / 32)], in order from the lowest bit on."""
    per = 32 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per) * per), np.uint32)
    padded[:, :columns] = codes
    words = np.zeros((rows, padded.shape[1] // per), np.uint32)
    for place in range(per):
        words |= padded[:, place::per] << np.uint32(bits * place)
    return words.view(np.int32)


def spread(scales: Array, columns: int, group: int) -> Array:
    return np.repeat(scales.astype(np.float32), group, 1)[:, :columns]


def scale_grid(rng: np.random.Generator, *shape: int, size: float = 0.01) -> Array:
    """Scales that are exact in fp16 and bf16."""
    raw = torch.from_numpy(rng.uniform(0.5 * size, size, shape).astype(np.float32))
    return raw.bfloat16().float().numpy()


def fp8_codes(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensor, Array]:
    values = torch.from_numpy(rng.normal(size=(rows, columns)).astype(np.float32))
    codes = values.to(torch.float8_e4m3fn)
    return codes, codes.float().numpy()


def fp8_blocks(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes, numbers = fp8_codes(rng, rows, columns)
    scales = rng.uniform(0.02, 0.1, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0)[:rows], 128, 1)[:, :columns]
    return {"weight": codes, "weight_scale_inv": scales}, numbers * wide


def fp8_blocks_of_modelopt(
    rng: np.random.Generator, rows: int, columns: int
) -> tuple[Fields, Array]:
    fields, numbers = fp8_blocks(rng, rows, columns)
    scales = fields.pop("weight_scale_inv")
    return fields | {"weight_scale": scales[:, None, :, None]}, numbers


def fp8_tensor(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes, numbers = fp8_codes(rng, rows, columns)
    scale = rng.uniform(0.02, 0.1, ()).astype(np.float32)
    inputs = {"input_scale": torch.tensor(0.5)}
    return {"weight": codes, "weight_scale": scale, **inputs}, numbers * scale


def fp8_channel(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes, numbers = fp8_codes(rng, rows, columns)
    scales = scale_grid(rng, rows, 1, size=0.1)
    stored = torch.from_numpy(scales).bfloat16()
    return {"weight": codes, "weight_scale": stored}, numbers * scales


def mxfp8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes, numbers = fp8_codes(rng, rows, columns)
    exponents = rng.integers(121, 125, (rows, columns // 32), dtype=np.uint8)
    scales = 2.0 ** (exponents.astype(np.float32) - 127)
    return {"weight": codes, "weight_scale": exponents}, numbers * spread(scales, columns, 32)


def int8_channel(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
    scales = scale_grid(rng, rows, 1, size=0.001)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales


def packed_integers(
    bits: int, group: int | None = 32, symmetric: bool = True, order: bool = False
) -> Callable[[np.random.Generator, int, int], tuple[Fields, Array]]:
    def write(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
        size, half = group or columns, 1 << bits - 1
        stored = rng.integers(0, 2 * half, (rows, columns))
        scales = scale_grid(rng, rows, -(-columns // size), size=0.08 / half)
        fields: Fields = {
            "weight_packed": packed(stored, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": np.array([rows, columns], np.int64),
        }
        zeros = np.full(scales.shape, half)
        if not symmetric:
            zeros = rng.integers(0, 2 * half, scales.shape)
            fields["weight_zero_point"] = np.ascontiguousarray(packed(zeros.T, bits).T)
        groups = np.arange(columns) // size
        if order:
            rng.shuffle(groups)
            fields["weight_g_idx"] = groups.astype(np.int32)
        return fields, (stored - zeros[:, groups]).astype(np.float32) * scales[:, groups]

    return write


def awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    codes = rng.integers(0, 16, (columns, rows))
    zeros = rng.integers(0, 16, (columns // 32, rows))
    scales = scale_grid(rng, columns // 32, rows).astype(np.float16)

    def words(plain: Array) -> Array:
        mixed = plain.reshape(len(plain), -1, 8)[:, :, AWQ_ORDER].reshape(plain.shape)
        return packed(mixed, 4)

    fields: Fields = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    wide = np.repeat(zeros, 32, 0), np.repeat(scales.astype(np.float32), 32, 0)
    return fields, ((codes - wide[0]).astype(np.float32) * wide[1]).T


def gptq(
    bits: int, less_one: bool, symmetric: bool, order: bool, group: int | None = 32
) -> Callable[[np.random.Generator, int, int], tuple[Fields, Array]]:
    def write(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
        size, half = group or columns, 1 << bits - 1
        # GPTQModel subtracts 1 in each place of a word at once.
        less = np.uint32((0x11111111 if bits == 4 else 0x01010101) if less_one else 0)
        codes = rng.integers(0, 2 * half, (columns, rows))
        scales = scale_grid(rng, columns // size, rows, size=0.08 / half).astype(np.float16)
        zeros = np.full(scales.shape, half)
        if not symmetric:
            zeros = rng.integers(0, 2 * half, scales.shape)
        groups = np.arange(columns) // size
        if order:
            rng.shuffle(groups)
        fields: Fields = {
            "qweight": np.ascontiguousarray(packed(codes.T, bits).T),
            "qzeros": (packed(zeros, bits).view(np.uint32) - less).view(np.int32),
            "scales": scales,
            "g_idx": groups.astype(np.int32),
        }
        return fields, (
            (codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)
        ).T

    return write


def e2m1(rng: np.random.Generator, rows: int, columns: int) -> tuple[Array, Array]:
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    numbers = E2M1[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers


def nvfp4(divides: bool) -> Callable[[np.random.Generator, int, int], tuple[Fields, Array]]:
    def write(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
        stored, numbers = e2m1(rng, rows, columns)
        scales = torch.from_numpy(rng.uniform(0.5, 2, (rows, columns // 16))).to(
            torch.float8_e4m3fn
        )
        whole = np.float32(rng.uniform(40, 60))
        inverse = np.float32(1) / whole
        names = (
            ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
        )
        fields: Fields = {
            names[0]: stored,
            "weight_scale": scales,
            names[1]: np.array([whole]) if divides else np.array(inverse),
        }
        wide = spread(scales.float().numpy() * inverse, columns, 16)
        return fields, numbers * wide

    return write


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[Fields, Array]:
    stored, numbers = e2m1(rng, rows, columns)
    exponents = rng.integers(119, 123, (rows, columns // 32), dtype=np.uint8)
    scales = 2.0 ** (exponents.astype(np.float32) - 127)
    fields: Fields = {"weight_packed": stored, "weight_scale": exponents}
    return fields, numbers * spread(scales, columns, 32)


def compressed(format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FP8 = {"type": "float", "num_bits": 8}
TOKEN = {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "token"}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FORMATS = {
    "fp8 blocks": Format(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 blocks, ModelOpt": Format(
        fp8_blocks_of_modelopt, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    ),
    "fp8 tensor": Format(fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 channel": Format(
        fp8_channel, compressed("float-quantized", TOKEN, strategy="channel", **FP8)
    ),
    "mxfp8": Format(
        mxfp8, compressed("mxfp8-quantized", strategy="group", group_size=32, **FP8), 32
    ),
    "int8 channel": Format(
        int8_channel,
        compressed("int-quantized", TOKEN | {"type": "int"}, num_bits=8, strategy="channel"),
    ),
    "int4 groups": Format(packed_integers(4), compressed("pack-quantized", **INT4), 32),
    "int4 channel": Format(
        packed_integers(4, None), compressed("pack-quantized", num_bits=4, strategy="channel")
    ),
    "int4 zeros": Format(
        packed_integers(4, 32, False),
        compressed("pack-quantized", symmetric=False, **INT4),
        32,
    ),
    "int4 order": Format(
        packed_integers(4, 32, False, True),
        compressed("pack-quantized", symmetric=False, actorder="group", **INT4),
        32,
    ),
    "int8 groups": Format(
        packed_integers(8),
        compressed("pack-quantized", **(INT4 | {"num_bits": 8})),
        32,
    ),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 32}, 32, 8),
    "gptq": Format(gptq(4, True, True, False), GPTQ, 32, 8),
    "gptq order": Format(gptq(4, True, True, True), GPTQ | {"desc_act": True}, 32, 8),
    "gptq zeros": Format(gptq(4, True, False, False), GPTQ | {"sym": False}, 32, 8),
    "gptq_v2": Format(
        gptq(4, False, False, False),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        32,
        8,
    ),
    "gptq 8 bits": Format(gptq(8, True, False, False), GPTQ | {"bits": 8, "sym": False}, 32, 4),
    "gptq channel": Format(gptq(4, True, True, False, None), GPTQ | {"group_size": -1}, 8, 8),
    "nvfp4": Format(
        nvfp4(True),
        compressed(
            "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
        ),
        16,
    ),
    "nvfp4, ModelOpt": Format(
        nvfp4(False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 16
    ),
    "mxfp4": Format(
        mxfp4,
        compressed(
            "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
        ),
        32,
    ),
}


def tensors_of(fields: Fields) -> dict[str, Tensor]:
    """The stored tensors, contiguous."""
    return {
        leaf: (
            field if isinstance(field, Tensor) else torch.from_numpy(np.array(field))
        ).contiguous()
        for leaf, field in fields.items()
    }
