"""Which kernel computes a layer of 2 to 256 rows with fp8 weights if the checkpoint asks for
8-bit activations: the fastest ones measured, and a rule for other shapes.

On Hopper GPUs the kernel of `hopper_codes` multiplies 33 to 256 rows. Torch multiplies more rows,
with kernels of their own that code its input and gate its output; of formats that it does not know,
as blocks without a Hopper GPU, it multiplies a copy in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..device import card_of
from ..linear.linear_choice import Shape, bucket_of
from ..quant.tiled import TiledWeight
from .kinds import Codes, fits_codes, fits_roles, format_name, has_groups

USE_ROLES = True  # whether 33 to 256 rows are multiplied by warps with roles

Key: TypeAlias = tuple[str, Shape, int]  # format, shape, upper bound of rows
# The layers of Llama 3 8B. `measure_codes.py` measured their fastest kernels on an H200.
_QKV, _O = Shape("qkv", 6144, 4096), Shape("o", 4096, 4096)
_GATE_UP, _DOWN = Shape("gate_up", 28672, 4096), Shape("down", 4096, 14336)
# With `USE_ROLES` on Hopper this table comes first, for 2 rows and more; None = a kernel without
# roles. Layers of 33 rows and more that it does not name follow `_with_roles`.
_ROLES: Mapping[Key, Codes | None] = {
    ("fp8", _GATE_UP, 256): Codes(128, 128, 4, 4, 1, 128, 0, 0, 0, roles=1, joined=1),
    ("fp8 blocks", _QKV, 64): None,  # 13.3 us, without roles 12.9
    ("fp8 blocks", _O, 128): Codes(64, 128, 8, 4, 2, 128, 1, 0, 0, roles=1),
}
# The fastest kernels without roles; None = not this one.
_MEASURED: Mapping[Key, Codes | None] = {
    ("fp8", _GATE_UP, 16): Codes(128, 128, 5, 8, 1, 16, 0),
    ("fp8", _DOWN, 16): Codes(128, 128, 5, 8, 8, 16),
    ("fp8", _QKV, 16): Codes(64, 128, 6, 4, 4, 16, 0),
    ("fp8", _O, 16): None,
    ("fp8", _GATE_UP, 128): None,  # 40.2 us, torch 34.7 and a kernel that gates and codes
    ("fp8", _DOWN, 128): Codes(64, 128, 4, 4, 4, 128),
    ("fp8", _QKV, 128): None,
    ("fp8", _O, 128): Codes(64, 128, 4, 4, 2, 128),
}


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
    if USE_ROLES and is_hopper(weight):
        choice = _ROLES.get(key, _with_roles(shape, bucket, has_groups(weight)))
        if choice is not None and fits_roles(weight, shape.role, choice.block_n):
            return choice
    if key in _MEASURED:
        return _MEASURED[key]
    return _rule(shape, bucket, has_groups(weight))


def is_hopper(weight: TiledWeight) -> bool:
    """Whether the GPU has the instructions that warps with roles use."""
    card = card_of(weight.device)
    return card is not None and card.capability == (9, 0)


def _with_roles(shape: Shape, bucket: int, by_group: bool) -> Codes | None:
    """The widest tile of weight rows that still fills an H200, by calculation; for 33 rows and more
    of the layers in `_MEASURED`, heads and others aside."""
    if bucket < 64 or not (shape.may_split or shape.role == "gate_up"):
        return None
    height = min(bucket, 128)
    by_group = by_group or shape.role in ("o", "down")  # which the layer before can code
    if shape.role == "gate_up":  # with tiles of a group, the kernel codes its output
        return Codes(128, 128, 5 if height == 64 else 4, 4, 1, height, int(by_group), 0, 0, roles=1)
    block_n, stages = 128, 8 if height == 64 else 6
    blocks = -(-shape.outputs // block_n) * (bucket // height)
    split_k = 1
    while shape.may_split and blocks * split_k * 2 <= 132 and shape.inputs >= 1024 * split_k:
        split_k *= 2
    return Codes(block_n, 128, stages, 4, split_k, height, int(by_group), 0, 0, roles=1)


def _rule(shape: Shape, bucket: int, by_group: bool) -> Codes | None:
    """Tiles in the pattern of the measured ones.

    Up to 16 rows it needs a kernel before the layer that codes them, and after attention there is
    none. For 17 to 64 rows, kernels with 16-bit activations were as fast. Above that torch is as
    fast for large matrices, but knows no blocks, and does not split K.
    """
    if bucket <= 16:
        wins = shape.role in ("qkv", "gate_up", "down")
    elif bucket <= 64:
        wins = False
    else:
        wins = by_group or (bucket <= 128 and shape.role in ("o", "down"))
    if not wins:
        return None
    height = min(bucket, 128)
    if shape.role == "gate_up":  # gate and up are two tiles; a program writes a group of codes
        if by_group and height > 64:  # for which registers lack room
            return Codes(64, 128, 3, 4, 1, height, 1)
        return Codes(128, 128, 5, 8, 1, height, int(by_group))
    by_group = by_group or shape.role in ("o", "down")  # which the layer before can code
    block_n, warps, stages = (64, 4, 4) if height > 64 else (64, 4, 6)
    split_k = 1
    tiles = -(-shape.outputs // block_n) * (bucket // height)
    least = 120 if height > 64 else 250
    while (
        shape.may_split
        and split_k < 8
        and tiles * split_k < least
        and shape.inputs // (2 * split_k) >= 512
    ):
        split_k *= 2
    return Codes(block_n, 128, stages, warps, split_k, height, int(by_group))
