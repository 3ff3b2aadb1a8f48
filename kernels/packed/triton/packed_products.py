"""Multiplies the numbers of a tile of packed words with x, and applies the scales of groups."""

# mypy: allow-untyped-defs, allow-incomplete-defs

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


hash_functions(globals())
