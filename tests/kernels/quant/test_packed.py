"""Packed weights: every kind's numbers equal those that NumPy computes one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.packed.linear import (
    packed_gated_linear,
    packed_linear,
    packed_sample_head,
)
from slipstream.kernels.quant.packed import HIGH_BITS, PackedWeight, can_concatenate, concatenate

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_weight(case: str, rows: int, columns: int, seed: int = 0) -> PackedWeight:
    """A weight of one of `CASES` with random codes."""
    rng, made = draws(seed), CASES[case]
    group = made.get("group") or columns
    row_group = made.get("row_group", 1)
    kind, grid = made["kind"], (-(-rows // row_group), -(-columns // group))
    fields: dict[str, Any] = {}
    if kind == "fp8":
        values = torch.from_numpy(rng.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.from_numpy(rng.integers(-128, 128, (rows, columns), dtype=np.int8))
    else:
        size = (rows, -(-columns // 2))
        values = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    if kind in HIGH_BITS:
        size = (rows, -(-columns * HIGH_BITS[kind] // 8))
        fields["high"] = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(0.5, 2, grid)).to(made.get("dtype", torch.float32))
    if made.get("e8m0"):
        scales = torch.from_numpy(rng.integers(120, 134, grid, dtype=np.uint8))
    if made.get("zeros"):
        fields["zeros"] = torch.from_numpy(rng.integers(0, 17, grid, dtype=np.uint8))
    if made.get("offsets"):
        fields["offsets"] = torch.from_numpy(rng.normal(size=grid)).to(scales.dtype)
    if made.get("super"):
        blocks = (rows, -(-columns // 256))
        scales = torch.from_numpy(rng.integers(0, 64, grid)).to(made["super"])
        fields["super_scales"] = torch.from_numpy(rng.uniform(0.5, 2, blocks)).half()
        if made.get("offsets"):
            fields["offsets"] = torch.from_numpy(rng.integers(0, 64, grid)).to(torch.uint8)
            fields["super_offsets"] = torch.from_numpy(-rng.uniform(0.5, 2, blocks)).half()
    if made.get("global"):
        fields["global_scale"] = torch.from_numpy(rng.uniform(0.5, 2, rows).astype(np.float32))
    if made.get("order"):
        fields["order"] = torch.from_numpy(rng.permutation(columns).astype(np.int32))
    return PackedWeight(kind, values, scales, columns, group, row_group, **fields)


CASES: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"kind": "fp8", "group": 128, "row_group": 128},
    "fp8 rows": {"kind": "fp8", "dtype": torch.bfloat16},
    "int8 rows": {"kind": "int8"},
    "int8 groups": {"kind": "int8", "group": 16, "offsets": True},
    "int4 offsets": {"kind": "int4", "group": 32, "offsets": True},
    "int4 super": {"kind": "int4", "group": 32, "super": torch.uint8, "offsets": True},
    "int8 super": {"kind": "int8", "group": 16, "super": torch.int8},
    "int4": {"kind": "int4", "group": 32, "dtype": torch.float16},
    "int4 zeros and order": {"kind": "int4", "group": 32, "zeros": True, "order": True},
    "int5 offsets": {"kind": "int5", "group": 32, "offsets": True},
    "int5 super": {"kind": "int5", "group": 32, "super": torch.uint8, "offsets": True},
    "int6 super": {"kind": "int6", "group": 16, "super": torch.int8},
    "int5": {"kind": "int5", "group": 32, "dtype": torch.float16},
    "mxfp4": {"kind": "fp4", "group": 32, "e8m0": True},
    "nvfp4": {"kind": "fp4", "group": 16, "dtype": torch.float8_e4m3fn, "global": True},
}


def numbers(weight: PackedWeight) -> np.ndarray[Any, Any]:
    """The numbers of a weight, one by one, in float32."""
    rows, columns = weight.shape
    out = np.empty((rows, columns), np.float32)
    plain = weight.values.float().numpy()
    scales = weight.scales
    if weight.kind == "fp4" and scales.dtype == torch.uint8:
        wide = 2.0 ** (scales.numpy().astype(np.float64) - 127)
    else:
        wide = scales.float().numpy()
    for row in range(rows):
        for column in range(columns):
            group = column // weight.group
            scale = np.float32(wide[row // weight.row_group, group])
            if weight.super_scales is not None:
                scale *= np.float32(weight.super_scales[row, column // 256])
            number: float
            if weight.kind not in ("fp8", "int8"):
                code = int(plain[row, column // 2]) >> (4 * (column % 2)) & 15
                if weight.high is not None:
                    bits = HIGH_BITS[weight.kind]
                    byte, place = divmod(column * bits, 8)
                    code |= (int(weight.high[row, byte]) >> place & (1 << bits) - 1) << 4
                number = code if weight.kind != "fp4" else E2M1[code % 8] * (1 - code // 8 * 2)
            else:
                number = plain[row, column]
            if weight.kind in ("int4", "int5", "int6"):
                middle = {"int4": 8, "int5": 16, "int6": 32}[weight.kind]
                symmetric = 0 if weight.offsets is not None else middle
                number -= symmetric if weight.zeros is None else int(weight.zeros[row, group])
            if weight.global_scale is not None:
                scale *= np.float32(weight.global_scale[row])
            value = np.float32(number) * scale
            if weight.offsets is not None:
                offset = np.float32(weight.offsets[row, group])
                if weight.super_offsets is not None:
                    offset *= np.float32(weight.super_offsets[row, column // 256])
                value += offset
            place = column if weight.order is None else int(weight.order[column])
            out[row, place] = value
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 129), (131, 64), (3, 520)], ids=str)
def test_numbers_are_exact(case: str, shape: tuple[int, int]) -> None:
    weight = random_weight(case, *shape)
    expected = torch.from_numpy(numbers(weight))
    assert torch.equal(weight.dequantise(torch.float32), expected)
    assert torch.equal(weight.dequantise(torch.bfloat16), expected.bfloat16())
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2], dtype=torch.int32)
    assert torch.equal(weight.rows(ids), expected[ids.long()])
    assert torch.equal(weight.first_rows(1).dequantise(), expected[:1])
    assert torch.equal(weight.by_rows().dequantise(), expected)
    assert torch.equal(weight.one_level().dequantise(), expected)
    assert weight.nbytes == sum(tensor.nbytes for tensor in weight.tensors)


def test_long_matrices_are_dequantised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("fp8 blocks", 300, 130)
    whole = weight.dequantise()
    monkeypatch.setattr("slipstream.kernels.quant.packed._PIECE_VALUES", 1000)
    assert torch.equal(weight.dequantise(), whole)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(128, 5), (100, 28, 3)], ids=str)
def test_parts_of_one_format_become_one_matrix(case: str, sizes: tuple[int, ...]) -> None:
    parts = [random_weight(case, rows, 96, seed) for seed, rows in enumerate(sizes)]
    if CASES[case].get("order"):
        assert not can_concatenate(parts)
        parts = [random_weight(case, rows, 96) for rows in sizes]
    if CASES[case].get("order"):  # one order for all
        order = parts[0].order
        parts = [
            PackedWeight(
                part.kind, part.values, part.scales, 96, part.group, 1, part.zeros, order=order
            )
            for part in parts
        ]
    assert can_concatenate(parts)
    joined = concatenate(parts)
    assert torch.equal(joined.dequantise(), torch.cat([part.dequantise() for part in parts]))
    assert joined.row_group == (parts[0].row_group if sizes[0] == 128 else 1)


def test_parts_of_different_formats_stay_apart() -> None:
    int4, fp8 = random_weight("int4", 4, 64), random_weight("fp8 rows", 4, 64)
    assert not can_concatenate([int4, fp8])
    assert not can_concatenate([int4, random_weight("int4 zeros and order", 4, 64)])


def test_the_largest_scale_of_inputs_serves_all_parts() -> None:
    def part(scale: float) -> PackedWeight:
        made = random_weight("fp8 rows", 2, 16)
        fields = dict(activations="fp8-static", input_scale=torch.tensor(scale))
        return PackedWeight("fp8", made.values, made.scales, 16, 16, **fields)  # type: ignore[arg-type]

    joined = concatenate([part(0.5), part(2.0), part(1.0)])
    assert joined.input_scale is not None and float(joined.input_scale) == 2.0


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_numbers(case: str) -> None:
    weight, generator = random_weight(case, 6, 96), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, bias, residual, scale = normal(3, 96), normal(6), normal(3, 6), normal(96)
    dense = weight.dequantise()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale
    out = packed_linear(x, weight, bias, None, (scale, 1e-5), residual)
    torch.testing.assert_close(out, residual + normed @ dense.T + bias, rtol=1e-4, atol=1e-3)
    gate, up = (x @ dense.T).chunk(2, -1)
    gated = packed_gated_linear(x, weight)
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-3)
    tokens, largest = packed_sample_head(x, weight)
    logits = x @ dense.T
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(largest, logits.amax(-1), rtol=1e-4, atol=1e-3)
