"""Operands of the tensor cores that lanes load directly, in an order of columns that suits them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions


@triton.jit
def lanes_of(source, rows, row_stride, SPAN: tl.constexpr, SPANS: tl.constexpr, HALF: tl.constexpr):
    """Pointers [8, SPANS, HALF] to the first half of a line of each row and span.

    A lane has 16 bytes, 4 lanes have a row, and a warp has a span.
    """
    s = tl.arange(0, SPANS)[None, :, None] * SPAN
    return source + (rows[:, None, None] * row_stride + s + tl.arange(0, HALF)[None, None])


@triton.jit
def wide(number):
    """A number as 64-bit integer, so that what is added to its multiples is part of a load."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def load_tile(pointers, inside, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """Load a tile; beyond the end, where MASKED, zeros."""
    if MASKED:
        tile = tl.load(pointers, mask=inside, other=0, eviction_policy=POLICY)
    else:
        tile = tl.load(pointers, eviction_policy=POLICY)
    return tile


@triton.jit
def rows_of_tile(start, num_outputs, MODE: tl.constexpr):
    """The 16 weight rows of a tile, if gated 8 of gate and 8 of up: all of them [16], rows 0 to 7
    and 8 to 15 [8], and which of rows 0 to 7, of 8 to 15 and of all there are."""
    low, sixteen = start + tl.arange(0, 8), tl.arange(0, 16)
    if MODE == 2:
        n = start + sixteen % 8 + sixteen // 8 * num_outputs
        high = low + num_outputs
        insides = low < num_outputs, low < num_outputs, start + sixteen % 8 < num_outputs
    else:
        n = start + sixteen
        high = low + 8
        insides = low < num_outputs, high < num_outputs, n < num_outputs
    return n, low, high, insides


@triton.jit
def words_of(pairs):
    """Words [8, SPANS, 2 * P] of pairs [8, SPANS, P] int32."""
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


@triton.jit
def left_operand(a0, a1, b0, b1):
    """The left operand [SPANS, 16, 64] of halves (0, 1) of rows 0 to 7 (a) and 8 to 15 (b).

    The order of columns is that in which the tensor cores want 4 neighbours in a lane.
    """
    both = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    SPANS: tl.constexpr = a0.shape[1]
    both = tl.reshape(both, [8, SPANS, 4, 2, 4, 2, 2])
    return tl.reshape(tl.permute(both, (1, 6, 0, 5, 3, 2, 4)), [SPANS, 16, 64])


@triton.jit
def right_operand(x0, x1):
    """The right operand [SPANS, 64, 8] of halves of 8 slices, in the same order of columns."""
    SPANS: tl.constexpr = x0.shape[1]
    both = tl.reshape(tl.join(x0, x1), [8, SPANS, 4, 2, 4, 2])
    return tl.reshape(tl.permute(both, (1, 5, 3, 2, 4, 0)), [SPANS, 64, 8])


hash_functions(globals())
