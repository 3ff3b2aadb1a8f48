"""Which kernel computes a linear layer with quantised weights, by format, shape and number of rows.

If the checkpoint asks for activations of 8 bits, 2 to 256 rows of fp8 are multiplied as codes with
codes where that was measured to be faster (`Codes`). Elsewhere torch multiplies more than 64 rows,
or more than 256 of blocks (`Quantised`). Other rows and other checkpoints have 16-bit activations,
and kernels of up to 64 rows multiply the exact numbers. `None` stands for a copy of the weight in
16 bits, which torch multiplies. A choice depends on shapes and formats, never on data, so a CUDA
graph may bake it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from ..device import use_triton
from ..linear.linear_choice import Gemv, Shape, Skinny, bucket_of
from ..quant.tiled import TiledWeight, Weight
from .coded_choice import choose_coded, is_hopper
from .kinds import (
    Direct,
    PackedChoice,
    Quantised,
    Row,
    fits,
    fits_few_rows,
    fits_gemv,
    fits_small_groups,
    format_name,
    has_groups,
)
from .tuned import tuned_choices

EXACT_ROWS = 64  # up to here, activations have 16 bits
BLOCK_ROWS = 256  # up to here, torch multiplies no codes with scales of blocks
FEW_ROWS = 8  # up to here, words of GGUF's types with super scales go straight to registers


# block_n, stages, num_warps, split_k, block_m (by default the rows, up to 64)
Sizes: TypeAlias = tuple[int, int, int, int, int] | tuple[int, int, int, int]


def choose_packed(weight: Weight, role: str, num_rows: int) -> PackedChoice:
    """The kernel for `num_rows` padded rows of a layer of this role; None = a copy, then torch."""
    if not isinstance(weight, TiledWeight) or not use_triton(weight.words):
        return None
    shape = Shape(role, *weight.shape)
    if shape.inputs % 8 or shape.outputs % (2 if role == "gate_up" else 1):
        return None  # rows of 16 bytes
    if weight.words.numel() >= 2**31:  # 32-bit offsets
        return None
    if (coded := choose_coded(weight, shape, num_rows)) is not None:
        return coded
    bucket = bucket_of(num_rows)
    if num_rows > (BLOCK_ROWS if has_groups(weight) else EXACT_ROWS) and can_quantise(weight):
        return Quantised()
    tuned = tuned_choices(weight.device)
    if tuned and (key := (format_name(weight), shape, bucket)) in tuned:
        if fits(weight, tuned[key]):
            return tuned[key]
    if bucket is None or (bucket > 128 and weight.kind == "fp4"):
        return None
    measured = _ONE_ROW.get((format_name(weight), shape)) if bucket == 1 else None
    if measured is not None and fits(weight, measured):
        return measured
    if bucket == 1 and fits_small_groups(weight):
        return _direct(weight, shape)
    if num_rows <= 16 and fits_few_rows(weight):
        few = _few_rows(weight, shape, num_rows)
        if few is not None:
            return few
    if bucket == 1 and fits_gemv(weight) and (role != "gate_up" or weight.row_group == 1):
        return _GEMVS.get(format_name(weight), {}).get(role, Gemv(4, 1024, 4))
    return _skinny(weight, shape, bucket)


def can_quantise(weight: TiledWeight) -> bool:
    """Whether torch multiplies codes of this format, and the checkpoint asks for it.

    Blocks need cuBLAS of CUDA 12.9, a Hopper GPU, and lines of scales that end at 16 bytes.
    """
    asks = {
        "fp8": ("fp8-token", "fp8-static"), "int8": ("int8-token",), "fp8 blocks": ("fp8-block",)
    }  # fmt: skip
    name, (rows, columns) = format_name(weight), weight.shape
    if weight.activations not in asks.get(name, ()) or weight.order is not None:
        return False
    if name == "fp8 blocks":
        whole = rows % 128 == 0 and columns % 512 == 0
        return whole and is_hopper(weight) and _cuda_version() >= (12, 9)
    return rows % 16 == 0 and columns % 8 == 0


def _cuda_version() -> tuple[int, ...]:
    """The version of CUDA that torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def _direct(weight: TiledWeight, shape: Shape) -> Direct:
    """The kernel for one row of a type of GGUF: the fastest on an H200 for Llama 3 8B's layers."""
    is_five, is_six = weight.kind == "int5", weight.kind == "int6"
    one_level = weight.super_scales is None
    if shape.may_split and shape.outputs <= 4096:  # few programs
        if shape.inputs > 8192 and not is_six and (one_level or not is_five):
            return Direct(1, 8, 1)
        return Direct(1, 4, 2 if is_six else 1, split_k=2)
    if shape.may_split:
        return Direct(1, 4, 1, split_k=2) if is_five and one_level else Direct(1, 4, 2)
    return Direct(1, 4, 2 if is_six or (one_level and not is_five) else 1)


def _few_rows(weight: TiledWeight, shape: Shape, num_rows: int) -> Direct | Skinny | None:
    """The kernel for 2 to 16 rows of a type of GGUF, as measured on an H200 for Llama 3 8B's
    layers: Q4_K and Q6_K with 8 rows, these and Q5_K, Q4_0 and Q8_0 with 16. None = `_skinny`."""
    has_supers = weight.super_scales is not None
    if has_supers and num_rows <= FEW_ROWS:
        split_k = 2 if shape.may_split and shape.outputs <= 4096 else 1
        return Direct(1, 4, 1, split_k, norm=0)
    columns = weight.slices * weight.slice_width
    if shape.role == "gate_up" and has_supers:
        if weight.kind == "int4":
            return Skinny(128, columns, 3, 4, 1, 16)
        return Direct(2, 4, 1, norm=0)
    if not shape.may_split or shape.inputs < 8 * 4 * columns:
        return None
    if weight.kind == "int5":
        few = Direct(2, 4, 1, 2, norm=0) if shape.outputs <= 4096 else Direct(1, 2, 1, 2, norm=0)
        return few if has_supers else None
    if weight.kind == "int8":
        return Skinny(64, columns, 4, 4, 8 if shape.outputs <= 4096 else 4, 16)
    return Skinny(128, columns, 3, 4, 8, 16)


def _skinny(weight: TiledWeight, shape: Shape, bucket: int) -> Skinny:
    columns = weight.slices * weight.slice_width
    height = 8 if bucket == 1 and shape.role in ("gate_up", "head") else min(max(bucket, 16), 64)
    measured = _TILES.get((format_name(weight), shape, bucket))
    if measured is not None:
        block_n, stages, warps, split_k, *own = measured
        return Skinny(block_n, columns, stages, warps, split_k, own[0] if own else height)
    if bucket > 64 and format_name(weight) in ("fp8", "int8"):
        height = 128
    split_k = 1
    tiles = -(-shape.outputs // 64) * max(1, bucket // height)
    while shape.may_split and tiles * split_k < 256 and shape.inputs // split_k >= 4 * columns:
        split_k *= 2
    stages = 3 if bucket >= 64 else 4
    if height == 128:
        return Skinny(128, columns, 3, 8, min(split_k, 4), height)
    # Scales of small groups of gate and up need registers: more warps share the sums.
    wide = fits_small_groups(weight) and shape.role == "gate_up" and height > 16
    return Skinny(64, columns, stages, 8 if wide else 4, split_k, height)


_QKV, _O = Shape("qkv", 6144, 4096), Shape("o", 4096, 4096)
_GATE_UP, _DOWN = Shape("gate_up", 28672, 4096), Shape("down", 4096, 14336)
_HEAD = Shape("head", 128256, 4096)

# The fastest on an H200 for Llama 3 8B, by format; unmeasured ones follow the rule above.
# `Row` is chosen for these shapes only: no GPU has checked it with others.
_ONE_ROW: Mapping[tuple[str, Shape], Gemv | Row | Direct] = {
    ("fp8", _QKV): Direct(1, 8, 1),
    ("fp8", _O): Direct(1, 4, 2, split_k=2),
    ("fp8", _GATE_UP): Direct(1, 4, 1, norm=0),
    ("fp8", _DOWN): Direct(1, 4, 4, split_k=2),
    ("fp8", _HEAD): Row(32, 3, 4, 1),
    ("int4", _QKV): Direct(1, 4, 1),
    ("int4", _O): Direct(1, 4, 2, split_k=2),
    ("int4", _GATE_UP): Row(16, 3, 4, 1, early=24),
    ("int4", _DOWN): Direct(1, 8, 2),
    ("int4", _HEAD): Row(32, 3, 4, 1),
}
_GEMVS: Mapping[str, Mapping[str, Gemv]] = {
    "fp8": {
        "qkv": Gemv(4, 1024, 4),
        "o": Gemv(8, 1024, 4),
        "gate_up": Gemv(4, 1024, 4),
        "down": Gemv(4, 2048, 4),
        "head": Gemv(8, 1024, 4),
    },
    "fp8 blocks": {
        "qkv": Gemv(4, 1024, 4),
        "o": Gemv(2, 2048, 4),
        "down": Gemv(2, 2048, 4),
    },
    "int8": {
        "qkv": Gemv(4, 2048, 4),
        "o": Gemv(4, 2048, 4),
        "gate_up": Gemv(4, 1024, 4),
        "down": Gemv(2, 2048, 4),
    },
}
_FP8: Mapping[tuple[Shape, int], Sizes] = {
    (_QKV, 16): (64, 6, 4, 4),
    (_GATE_UP, 16): (64, 6, 4, 1),
    (_O, 32): (128, 4, 8, 8),
    (_DOWN, 32): (128, 4, 8, 8),
    (_DOWN, 64): (128, 3, 8, 8),
    (_HEAD, 64): (128, 3, 8, 1),
}
_INT4: Mapping[tuple[Shape, int], Sizes] = {
    (_O, 1): (64, 6, 4, 4),
    (_GATE_UP, 1): (64, 6, 4, 1),
    (_DOWN, 1): (128, 4, 8, 8),
    (_HEAD, 1): (128, 4, 4, 1),
    (_O, 16): (64, 6, 4, 4),
    (_DOWN, 16): (128, 4, 8, 8),
    (_HEAD, 16): (128, 3, 4, 1),
    (_QKV, 32): (128, 3, 4, 4),
    (_DOWN, 32): (128, 3, 4, 8),
    (_QKV, 64): (64, 2, 4, 4),
    (_O, 64): (64, 3, 4, 4),
    (_GATE_UP, 64): (128, 3, 8, 1),
    (_DOWN, 64): (64, 3, 4, 4),
    (_QKV, 128): (64, 2, 4, 2),
    (_O, 128): (64, 3, 4, 2),
    (_GATE_UP, 128): (128, 3, 8, 1),
    (_DOWN, 128): (64, 3, 4, 2, 128),
    (_QKV, 256): (64, 2, 4, 1),
    (_O, 256): (64, 3, 4, 1, 128),
    (_GATE_UP, 256): (64, 2, 4, 1),
    (_DOWN, 256): (128, 3, 8, 2, 128),
}
_FP8_BLOCKS: Mapping[tuple[Shape, int], Sizes] = {
    (_QKV, 16): (128, 3, 4, 4),
    (_DOWN, 16): (128, 3, 4, 8),
    (_DOWN, 32): (128, 3, 4, 8),
    (_O, 64): (128, 3, 8, 8),
    (_DOWN, 64): (128, 3, 8, 8),
}
_TILES: Mapping[tuple[str, Shape, int], Sizes] = {
    (name, shape, bucket): sizes
    for name, table in (
        ("fp8", _FP8),
        ("int8", _FP8),
        ("fp8 blocks", _FP8_BLOCKS),
        ("int4", _INT4),
    )
    for (shape, bucket), sizes in table.items()
}
