"""The kernels for linear layers with quantised weights besides those that bf16 has, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..linear.linear_choice import GATE_UP as GATE_UP
from ..linear.linear_choice import PARTS as PARTS
from ..linear.linear_choice import PLAIN as PLAIN
from ..linear.linear_choice import Gemv, Skinny
from ..quant.tiled import TiledWeight, Weight
from .coding import SPAN, Coding

WIDTH = 64  # columns of a slice that the kernel of `Row` knows
_MOST_GROUPED = 128  # experts of a layer that `hopper_experts` knows
_GROUPED = ("silu", "clamped_swiglu")  # their activations
SMALL_GROUPS = (("int4", 32), ("int5", 32), ("int6", 16), ("int8", 32))  # kinds, and columns


@dataclass(frozen=True)
class Quantised:
    """Activations are quantised row by row to the weight's type, and torch multiplies codes."""

    norm: int = 0  # the norm is another kernel


@dataclass(frozen=True)
class Row:
    """A kernel for up to 16 rows on the tensor cores.

    The next kernel sums the parts of a split.
    """

    block_n: int  # weight rows of a program
    stages: int
    num_warps: int
    split_k: int
    spans: int = 4  # of a step; the warps share them
    norm: int = 1  # 1 = the kernel applies the norm before the layer; only of one row
    early: int = 16  # MiB of the matrix, at most, prefetched into L2 before the input is ready


@dataclass(frozen=True)
class Direct:
    """A kernel for one row on the tensor cores whose words go from memory straight to registers.

    The next kernel sums the parts of a split.
    """

    tiles: int  # of 16 weight rows, in a program; of gate and up 8 rows each
    num_warps: int  # each multiplies its own spans of columns
    ahead: int  # steps whose words are in registers, or on their way there
    split_k: int = 1  # parts, at most: none is empty
    norm: int = 1  # 1 = the kernel applies the norm before the layer


@dataclass(frozen=True)
class Codes:
    """A kernel for 2 to 256 rows that multiplies codes of activations by codes of weights.

    Activations have 8 bits, as the checkpoint asks. The next kernel sums the parts of a split.
    """

    block_n: int  # weight rows of a program, for gate and up each
    block_k: int  # codes of a step; 128 if `by_group`
    stages: int
    num_warps: int
    split_k: int
    block_m: int  # rows of a program
    by_group: int = 1  # 1 = activations have a scale for each row and 128 columns, 0 = for each row
    promote: int = 1  # 1 = the products of each step are added in float32, 0 = by the tensor cores
    early: int = 512  # bytes of a weight row prefetched into L2 before the input is ready
    norm: int = 0  # the norm is another kernel, which writes codes
    # 1 = the kernel whose warps have roles (`hopper_codes`), for Hopper; then `block_k` is 128,
    # `block_m` is 64 or 128, and `num_warps` and `early` have no meaning
    roles: int = 0
    narrow: int = 0  # 1 = parts have 16 bits; of o and down
    # With roles and 128 rows: 1 = gate and up are one product of the tensor cores, if whole rows
    # have scales
    joined: int = 0


PackedChoice: TypeAlias = Gemv | Skinny | None | Quantised | Row | Direct | Codes


def format_name(weight: TiledWeight) -> str:
    """The name of a format in the tables of `choice` and `tuned`."""
    if fits_small_groups(weight):
        return f"{weight.kind} {weight.group}" + (" offsets" if weight.offsets is not None else "")
    if weight.kind == "fp8" and has_groups(weight):
        return "fp8 blocks" if weight.group == 128 else "fp8 groups"
    if weight.kind == "int8" and has_groups(weight):
        return "int8 groups"
    return weight.kind


def fits_row(weight: TiledWeight) -> bool:
    """Whether the kernel of `Row` knows the format: whole spans, slices of 64, no offsets, scales
    of one level."""
    if weight.slice_width != WIDTH or weight.offsets is not None:
        return False
    if weight.super_scales is not None:
        return False
    return weight.columns % (weight.slices * WIDTH) == 0


def fits_direct(weight: TiledWeight) -> bool:
    """Whether the kernel of `Direct` knows the format."""
    whole = not has_groups(weight)
    return (
        fits_row(weight)
        and weight.kind != "fp4"
        and (whole or weight.group <= WIDTH * weight.slices)
    )


def fits_small_groups(weight: TiledWeight) -> bool:
    """Whether the kernel of `Direct` for small groups knows the format: that of a type of GGUF."""
    if weight.zeros is not None or weight.order is not None or weight.row_group > 1:
        return False
    small = (weight.kind, weight.group) in SMALL_GROUPS
    return small and (weight.high is not None or weight.group < weight.columns)


def fits_few_rows(weight: TiledWeight) -> bool:
    """Whether the kernel of `Direct` for 2 to 16 rows knows the format."""
    return fits_small_groups(weight) and weight.scales.dim() == 3


def fits_codes(weight: TiledWeight) -> bool:
    """Whether the kernel of `Codes` knows the format: e4m3 with scales of rows, or of 128
    columns."""
    known = weight.group == 128 or not has_groups(weight)
    return weight.kind == "fp8" and weight.order is None and known


def fits_roles(weight: TiledWeight, role: str, block_n: int) -> bool:
    """Whether the kernel of `Codes` with roles knows a layer: no tile of weight rows may meet two
    blocks."""
    outputs = weight.shape[0] // (2 if role == "gate_up" else 1)
    whole = not has_groups(weight) or (
        weight.row_group % block_n == 0 and outputs % weight.row_group == 0
    )
    return fits_codes(weight) and whole


def codes_output(choice: Codes, mode: int, coding: Coding) -> bool:
    """Whether a kernel can write what it computes as coded rows: of a gated layer, if a program has
    a whole group."""
    return mode == GATE_UP and coding.by_group and choice.block_n == SPAN


def can_group(count: int, hidden: int, inner: int, activation: str) -> bool:
    """Whether `hopper_experts` can compute `count` experts with these sizes. If it cannot, their
    matrices need no factors."""
    whole = hidden % 64 == 0 and inner % 64 == 0  # tiles of one matrix alone
    return whole and count <= _MOST_GROUPED and activation in _GROUPED


def has_groups(weight: Weight) -> bool:
    """Whether scales belong to groups of columns or blocks, not to whole rows."""
    return weight.group < weight.columns or weight.row_group > 1


def fits_gemv(weight: TiledWeight) -> bool:
    """Whether the kernel of `Gemv` knows the format: 8 bits, scales of rows or of 128 columns."""
    if weight.slices != 2 or weight.offsets is not None or weight.super_scales is not None:
        return False
    return not has_groups(weight) or weight.group == 128


def fits(weight: TiledWeight, choice: PackedChoice) -> bool:
    """Whether the chosen kernel knows the format."""
    if isinstance(choice, Row):
        return fits_row(weight)
    if isinstance(choice, Direct):
        return fits_direct(weight) or fits_small_groups(weight)
    if isinstance(choice, Codes):
        return fits_codes(weight)
    return not isinstance(choice, Gemv) or fits_gemv(weight)
