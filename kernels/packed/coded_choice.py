"""Which kernel computes a layer of 2 to 256 rows with fp8 weights if the checkpoint asks for 8-bit
activations: the fastest ones measured, and a rule for other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..linear.linear_choice import Shape, bucket_of
from ..quant.tiled import TiledWeight
from .kinds import Codes, fits_codes, format_name, has_groups

# format, shape, upper bound of rows -> the fastest kernel; None = not this one. Written by
# `tests/lab/measure_codes.py` on an H200.
Key: TypeAlias = tuple[str, Shape, int]
_MEASURED: Mapping[Key, Codes | None] = {}


def asks_for_codes(weight: TiledWeight) -> bool:
    """Whether the checkpoint asks for activations of 8 bits and the kernel of `Codes` knows the
    format."""
    asks = weight.activations in ("fp8-token", "fp8-static", "fp8-block")
    return asks and fits_codes(weight)


def choose_coded(weight: TiledWeight, shape: Shape, num_rows: int) -> Codes | None:
    """The kernel for codes of `num_rows` rows; None = another one."""
    bucket = bucket_of(num_rows)
    if num_rows < 2 or bucket is None or not asks_for_codes(weight):
        return None
    key = format_name(weight), shape, bucket
    if key in _MEASURED:
        return _MEASURED[key]
    return _rule(shape, bucket, has_groups(weight))


def _rule(shape: Shape, bucket: int, by_group: bool) -> Codes | None:
    """Tiles that fill the GPU with one wave of programs.

    Few rows keep 16 bits where no kernel before the layer can code them, as after attention.
    """
    if bucket <= 64 and shape.role not in ("qkv", "gate_up", "down"):
        return None
    height = min(bucket, 128)
    if shape.role == "gate_up":  # gate and up are two tiles; a program writes a group of codes
        if by_group and height > 64:  # for which registers lack room
            return Codes(64, 128, 3, 4, 1, height, 1)
        return Codes(128, 128, 4 if height > 64 else 5, 8, 1, height, int(by_group))
    by_group = by_group or shape.role in ("o", "down")  # which the layer before can code
    wide = height > 32
    block_n, warps, stages = (128, 8, 5) if wide else (64, 4, 6)
    split_k = 1
    tiles = -(-shape.outputs // block_n) * (bucket // height)
    least, most = (100, 2) if height >= 128 else (200, 8)
    while (
        shape.may_split
        and split_k < most
        and tiles * split_k < least
        and shape.inputs // (2 * split_k) >= 512
    ):
        split_k *= 2
    return Codes(block_n, 128, stages, warps, split_k, height, int(by_group))
