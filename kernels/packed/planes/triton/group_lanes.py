"""Operands of the tensor cores and scales of small groups, as lanes load them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ....launch import hash_functions
from ....quant.triton.packed_codes import int4_parts, numbers
from ....quant.triton.plane_codes import plane_numbers
from ...triton.packed_lanes import load_tile, wide, words_of


@triton.jit
def left_of_group(a, b, FIRST: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr):
    """The left operand [SPANS, 16, GROUP] of a group: slices from FIRST on of rows 0 to 7 (a) and
    8 to 15 (b), in an order of columns in which a lane has 4 neighbours."""
    SPANS: tl.constexpr = a[0].shape[1]
    if PER == 2:
        low, high = tl.join(a[FIRST], a[FIRST + 1]), tl.join(b[FIRST], b[FIRST + 1])
        both = tl.reshape(tl.join(low, high), [8, SPANS, 4, 4, 2, 2])
        both = tl.permute(both, (1, 5, 0, 4, 2, 3))
    elif WIDTH == 16:
        both = tl.permute(tl.join(a[FIRST], b[FIRST]), (1, 3, 0, 2))
    else:
        both = tl.reshape(tl.join(a[FIRST], b[FIRST]), [8, SPANS, 4, 2, 4, 2])
        both = tl.permute(both, (1, 5, 0, 3, 2, 4))
    return tl.reshape(both, [SPANS, 16, PER * WIDTH])


@triton.jit
def right_of_groups(x0, x1, GROUP: tl.constexpr):
    """The right operand [SPANS, GROUP, 8] of the groups of a unit, in the same order of columns, of
    halves of 16 columns [8, SPANS, 16]."""
    SPANS: tl.constexpr = x0.shape[1]
    if GROUP == 32:
        both = tl.reshape(tl.join(x0, x1), [8, SPANS, 4, 4, 2])
        both = tl.permute(both, (1, 4, 2, 3, 0))
    else:
        both = tl.permute(x0, (1, 2, 0))
    return tl.reshape(both, [SPANS, GROUP, 8])


@triton.jit
def first_columns(WIDTH: tl.constexpr):
    """The columns of a group's first half: those of the first 4 words of each lane."""
    j = tl.arange(0, 16)
    if WIDTH == 32:
        j = j // 4 * 8 + j % 4
    return j


@triton.jit
def scale_lanes(source, rows, stride, row_stride, SPANS: tl.constexpr, P: tl.constexpr):
    """Pointers [8, SPANS, 8] to scales of 8 rows and groups, or [4, 8, SPANS, 2] of pairs of groups
    if rows are neighbours in memory.

    Lanes are along pairs, then along rows, as in sums of the tensor cores. The compiler must not
    see that rows are neighbours, or it would choose other lanes: `row_stride` is unknown to it.
    """
    if P > 1:
        group = tl.arange(0, 8)[None, None, :]
        unit = (tl.arange(0, SPANS) * (8 // P))[None, :, None]
        at = (unit + group // P) * stride + group % P
        pointers = source + (at + (rows * P)[:, None, None])
    else:
        group = (tl.arange(0, 4) * 2)[:, None, None, None] + tl.arange(0, 2)[None, None, None]
        unit = (tl.arange(0, SPANS) * 8)[None, None, :, None]
        at = (unit + group) * stride + (rows * row_stride)[None, :, None, None]
        pointers = source + at
    return pointers


@triton.jit
def scales_inside(s, is_unit, rows_inside, num_groups, P: tl.constexpr):
    """Which of the scales of `_scale_lanes` there are."""
    if P > 1:
        group = s[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        inside = is_unit[None, :, None] & (group < num_groups) & rows_inside[:, None, None]
    else:
        group = s[None, :, None] * 8 + (tl.arange(0, 4) * 2)[:, None, None]
        group += tl.arange(0, 2)[None, None, :]
        inside = (is_unit[None, :, None] & (group < num_groups))[:, None]
        inside = inside & rows_inside[None, :, None, None]
    return inside


@triton.jit
def scales_by_row(a, b, P: tl.constexpr):
    """Scales [SPANS, 16, 8] in float32 of those of rows 0 to 7 (a) and 8 to 15 (b)."""
    if P > 1:
        both = tl.permute(tl.join(a, b), (1, 3, 0, 2))
    else:
        both = tl.permute(tl.join(a, b), (2, 4, 1, 0, 3))
    return tl.reshape(both, [both.shape[0], 16, 8]).to(tl.float32)


@triton.jit
def load_words(
    pointers,  # to words of rows 0 to 7 and 8 to 15 of a first plane, then of a second
    insides, s, unit, step, num_words, is_unit,
    FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The pairs of words of units s of 16 weight rows: a tuple of tiles of rows 0 to 7, of rows 8
    to 15, and of both of the second plane."""
    LOWS: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    loaded = ()
    for half in tl.static_range(2):
        at = pointers[half] + wide(unit) * (LOWS * WIDTH // 2)
        for t in tl.static_range(LOWS):
            there = is_unit & ((s * LOWS + t) * WIDTH < num_words)
            there = insides[half][:, None, None] & there[None, :, None]
            offset = (step * LOWS + t) * WIDTH // 2
            loaded += (load_tile(at + offset, there, MASKED, "evict_first"),)
    for half in tl.static_range(2):
        if KIND >= 4:
            at = pointers[2 + half] + (wide(unit) * (WIDTH // 2) + step * WIDTH // 2)
            there = insides[half][:, None, None] & is_unit[None, :, None]
            loaded += (load_tile(at, there, MASKED, "evict_first"),)
        else:
            loaded += (is_unit,)
    return loaded


@triton.jit
def tile_numbers(
    pairs, high, TILE: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
    OFFSETS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The numbers of the slices of a tile of words, before scales."""
    words = words_of(pairs)
    if KIND >= 4:
        tiles = plane_numbers(words, high, TILE, KIND, DTYPE, not OFFSETS, ASSEMBLY)
    elif KIND == 2 and ASSEMBLY and DTYPE == tl.bfloat16:
        tiles = int4_parts(words)
    else:
        tiles = numbers(words, (), KIND, DTYPE, False, ASSEMBLY)
    return tiles


hash_functions(globals())
