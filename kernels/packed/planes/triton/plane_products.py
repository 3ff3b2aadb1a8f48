"""Multiplies the numbers of words of two planes with x, as `packed_products` does of one."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ....launch import hash_functions
from ....linear.triton.skinny import _tile
from ....quant.triton.plane_codes import UNITS, bits_of_step, plane_numbers
from ....quant.triton.plane_scales import factor_of
from ...triton.packed_products import _rounded, _side_by_side

_UNIT_BF16, _UNIT_F16 = (tl.constexpr(unit) for unit in UNITS.values())


@triton.jit
def plane_tiles(
    low_source,  # descriptor of, or pointer to, the words of the first plane [N, W]
    high_source,  # the same of the second
    row,
    k,
    num_rows,
    num_words,
    num_high,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    TMA: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """The words of 128 columns from k: two tiles of the first plane and one of the other, each
    [BLOCK_N, 16]."""
    a = _tile(low_source, row, k // 4, num_rows, num_words, BLOCK_N, 16, TMA)
    b = _tile(low_source, row, k // 4 + 16, num_rows, num_words, BLOCK_N, 16, TMA)
    COLUMNS: tl.constexpr = 256 if KIND == 4 else 128
    high = _tile(high_source, row, k // COLUMNS * 16, num_rows, num_high, BLOCK_N, 16, TMA)
    return a, b, bits_of_step(high, k, KIND, ASSEMBLY)


@triton.jit
def _read(acc, ASSEMBLY: tl.constexpr):
    """Let the sums be complete before what follows, as in `add_span`: otherwise numbers and sums of
    all groups would be in registers at once."""
    if ASSEMBLY:
        tl.inline_asm_elementwise("", "=r,f", [acc], tl.int32, is_pure=False, pack=1)


@triton.jit
def add_planes(
    accs,  # tuple of [BLOCK_N, BLOCK_M]: of one matrix, or of gate and up
    words,  # for each of them, see `plane_tiles`
    xs,  # tuple of tiles of x: [BLOCK_M, GROUP] of each group; with ROUND [BLOCK_M, 64]
    scales,  # for each matrix, see `plane_factors`
    zeros,
    FORM: tl.constexpr,  # as of `add_products`
    STORED: tl.constexpr,
):
    """Add the products of a span to the sums.

    Scales multiply the sums of their groups, and offsets the sums of a group's inputs, which the
    tensor cores compute, too. With ROUND they make numbers, which are rounded.
    """
    SLICES: tl.constexpr = FORM[0]
    GROUPS: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    OFFSETS: tl.constexpr = FORM[5] == 2
    ROUND: tl.constexpr = FORM[6]
    ASSEMBLY: tl.constexpr = FORM[7]
    PER: tl.constexpr = SLICES // GROUPS  # slices of a group
    LOWS: tl.constexpr = SLICES // 4
    dtype: tl.constexpr = xs[0].dtype
    HALF: tl.constexpr = _UNIT_BF16 if dtype == tl.bfloat16 else _UNIT_F16
    UNIT: tl.constexpr = HALF if ASSEMBLY else 1.0
    for t in tl.static_range(LOWS):
        tiles = ()
        for j in tl.static_range(len(accs)):
            tiles += (
                plane_numbers(words[j][t], words[j][LOWS], t, KIND, dtype, not OFFSETS, ASSEMBLY),
            )
        if ROUND:
            added = ()
            for j in tl.static_range(len(accs)):
                made = ()
                for i in tl.static_range(4):
                    scale = factor_of(scales[j], (4 * t + i) // PER, GROUPS, STORED) * UNIT
                    offset = scale
                    if OFFSETS:
                        offset = factor_of(zeros[j], (4 * t + i) // PER, GROUPS, STORED)
                    made += (_rounded(tiles[j][i], scale, offset, OFFSETS),)
                acc = tl.dot(_side_by_side(made, 0, 4), xs[t].T, accs[j])
                _read(acc, ASSEMBLY)
                added += (acc,)
            accs = added
        else:
            for i in tl.static_range(4 // PER):
                x = xs[t * 4 // PER + i].T
                added = ()
                total = accs[0]
                if OFFSETS:
                    total = tl.dot(tl.full([total.shape[0], x.shape[0]], 1.0, dtype), x)
                for j in tl.static_range(len(accs)):
                    part = tl.dot(_side_by_side(tiles[j], i * PER, PER), x)
                    scale = factor_of(scales[j], t * 4 // PER + i, GROUPS, STORED) * UNIT
                    acc = accs[j] + scale[:, None] * part
                    if OFFSETS:
                        offset = factor_of(zeros[j], t * 4 // PER + i, GROUPS, STORED)
                        acc += offset[:, None] * total
                    _read(acc, ASSEMBLY)
                    added += (acc,)
                accs = added
    return accs


hash_functions(globals())
