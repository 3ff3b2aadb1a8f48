"""Operands of the tensor cores and scales of small groups, as lanes load them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ....launch import hash_functions


@triton.jit
def words_of(pairs):
    """Words [8, SPANS, 2 * P] of pairs [8, SPANS, P] int32."""
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


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


hash_functions(globals())
