"""Multiplies the numbers of a tile of packed words with x, and applies the scales of groups."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions
from ...quant.triton.packed_codes import numbers
from ...quant.triton.packed_scales import scaled


@triton.jit
def _of_rows(vector, like):
    """A vector [rows] for each column of a tile.

    A layout follows from the pair that it is made of; without it, the compiler would move the whole
    tile through shared memory instead of the vector.
    """
    pair = tl.join(vector, vector)[:, :, None]
    return tl.reshape(tl.broadcast_to(pair, [like.shape[0], 2, like.shape[1] // 2]), like.shape)


@triton.jit
def _rounded(tile, scale, offset, OFFSET: tl.constexpr):
    """Numbers times scales [rows], plus offsets [rows], rounded once."""
    wide = tile.to(tl.float32) * _of_rows(scale, tile)
    if OFFSET:
        wide += _of_rows(offset, tile)
    return wide.to(tile.dtype)


@triton.jit
def add_products(
    acc,  # [BLOCK_N, BLOCK_M]
    words,  # [BLOCK_N, WIDTH]
    xs,  # tuple of [BLOCK_M, WIDTH], a slice of x for each slice of the words
    scales,  # tuple: [BLOCK_N] for each group, or of "fp4" [BLOCK_N, 64 / GROUP] for each slice
    zeros,  # tuple: [BLOCK_N] for each group, zeros or offsets
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ZEROS: tl.constexpr,  # 0 = none, 1 = zeros, 2 = offsets
    ASSEMBLY: tl.constexpr,
):
    """Add the products of a span to the sums.

    From 128 rows on, the registers do not hold a second set of sums; so numbers are scaled and
    rounded first. Below, scales of groups multiply the sums over their columns.

    Offsets are multiplied with the sum of a group's inputs, those of "int4" with 8 scales more,
    since 8 is subtracted from its codes.
    """
    PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES  # slices of a group
    of_slice = zeros
    if ZEROS == 1:
        of_slice = zeros[0], zeros[1 // PER], zeros[2 // PER], zeros[3 // PER]
    tiles = numbers(words, of_slice, KIND, xs[0].dtype, ZEROS == 1, ASSEMBLY)
    if KIND == 3:
        for i in tl.static_range(SLICES):
            acc = tl.dot(scaled(tiles[i], scales[i], GROUP, E8M0), xs[i].T, acc)
    elif GROUPS > 0 and xs[0].shape[0] >= 128:
        for i in tl.static_range(SLICES):
            scale = scales[i // PER].to(tl.float32)
            offset = scale
            if ZEROS == 2:
                offset = zeros[i // PER].to(tl.float32)
                if KIND == 2:
                    offset += 8.0 * scale
            acc = tl.dot(_rounded(tiles[i], scale, offset, ZEROS == 2), xs[i].T, acc)
    elif GROUPS == 0:
        for i in tl.static_range(SLICES):
            acc = tl.dot(tiles[i], xs[i].T, acc)
    else:
        for g in tl.static_range(GROUPS):
            part = tl.dot(tiles[g * PER], xs[g * PER].T)
            for i in tl.static_range(1, PER):
                part = tl.dot(tiles[g * PER + i], xs[g * PER + i].T, part)
            scale = scales[g].to(tl.float32)
            acc += scale[:, None] * part
            if ZEROS == 2:
                offset = zeros[g].to(tl.float32)
                if KIND == 2:
                    offset += 8.0 * scale
                total = tl.sum(xs[g * PER].to(tl.float32), 1)
                for i in tl.static_range(1, PER):
                    total += tl.sum(xs[g * PER + i].to(tl.float32), 1)
                acc += offset[:, None] * total[None, :]
    return acc


@triton.jit
def tile_of_spans(
    source,  # descriptor of, or pointer to, [num_spans, rows, 64]
    span,
    row,
    num_spans,
    num_rows,
    span_stride,
    row_stride,
    SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a tile [SPANS, ROWS, 64], with zeros beyond the end."""
    if TMA:
        tile = source.load([span, row, 0])
    else:
        s = (span + tl.arange(0, SPANS))[:, None, None]
        r = (row + tl.arange(0, ROWS))[None, :, None]
        at = s * span_stride + r * row_stride + tl.arange(0, 64)[None, None, :]
        tile = tl.load(source + at, mask=(s < num_spans) & (r < num_rows), other=0)
    return tile


@triton.jit
def add_spans(
    sums,  # tuple of 4: [SPANS, BLOCK_N, 8], of which column i of the i-th counts
    words,  # [SPANS, BLOCK_N, 64]
    xts,  # tuple of 4: [SPANS, 64, 8 or BLOCK_M], the right operand of each slice
    scales,  # tuple of 4, see `of_spans`
    zeros,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Add the products of a step."""
    PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES  # slices of a group
    of_slice = scales
    if ZEROS:
        of_slice = zeros[0], zeros[1 // PER], zeros[2 // PER], zeros[3 // PER]
    tiles = numbers(words, of_slice, KIND, xts[0].dtype, ZEROS, ASSEMBLY)
    added = ()
    for i in tl.static_range(4):
        if i >= SLICES:
            added += (sums[i],)
        elif KIND == 3:
            added += (tl.dot(scaled(tiles[i], scales[i], GROUP, E8M0), xts[i], sums[i]),)
        elif GROUPS == 0:
            added += (tl.dot(tiles[i], xts[i], sums[i]),)
        else:
            scale = scales[i // PER].to(tl.float32)
            added += (sums[i] + scale[:, :, None] * tl.dot(tiles[i], xts[i]),)
    return added


@triton.jit
def total_of_spans(sums, SLICES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sums of all slices and spans: [BLOCK_N, BLOCK_M], of one row [BLOCK_N, 1]."""
    total = sums[0]
    if BLOCK_M == 0:  # column i of the i-th tile
        column = tl.arange(0, 8)[None, None, :]
        total = tl.where(column == 0, total, 0.0)
        for i in tl.static_range(1, SLICES):
            total += tl.where(column == i, sums[i], 0.0)
        y = tl.sum(tl.sum(total, 2), 0)[:, None]
    else:
        for i in tl.static_range(1, SLICES):
            total += sums[i]
        y = tl.sum(total, 0)
    return y


hash_functions(globals())
