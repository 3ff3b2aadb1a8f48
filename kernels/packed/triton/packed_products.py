"""Multiplies the numbers of a tile of packed words with x, and applies the scales of groups."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions
from ...quant.triton.packed_codes import int4_codes, int4_parts, numbers
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
    if scale.dtype == tile.dtype and not OFFSET:  # an instruction multiplies two and rounds once
        rounded = tile * _of_rows(scale, tile)
    else:
        wide = tile.to(tl.float32) * _of_rows(scale.to(tl.float32), tile)
        if OFFSET:
            wide += _of_rows(offset, tile)
        rounded = wide.to(tile.dtype)
    return rounded


@triton.jit
def _side_by_side(tiles, first, COUNT: tl.constexpr):
    """COUNT tiles [rows, width] as one [rows, COUNT * width], which moves nothing."""
    rows: tl.constexpr = tiles[0].shape[0]
    columns: tl.constexpr = COUNT * tiles[0].shape[1]
    if COUNT == 1:
        both = tiles[first]
    elif COUNT == 2:
        pair = tl.join(tiles[first], tiles[first + 1])
        both = tl.reshape(tl.permute(pair, (0, 2, 1)), [rows, columns])
    else:
        even = tl.join(tiles[first], tiles[first + 2])
        odd = tl.join(tiles[first + 1], tiles[first + 3])
        both = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [rows, columns])
    return both


@triton.jit
def add_span(
    acc,  # [BLOCK_N, BLOCK_M]
    words,  # [BLOCK_N, WIDTH]
    xs,  # tuple of [BLOCK_M, columns], a tile of x for each product
    scales,  # as of `add_products`
    zeros,
    FORM: tl.constexpr,  # as of `add_products`
):
    """`add_products` with few products: one for each group whose scales multiply sums, else one.

    Before a product the operands in registers are complete, and after it the sum is: otherwise the
    compiler lets the tensor cores wait after each of their instructions.
    """
    SLICES: tl.constexpr = FORM[0]
    GROUPS: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    E8M0: tl.constexpr = FORM[4]
    ZEROS: tl.constexpr = FORM[5]
    ROUND: tl.constexpr = FORM[6]
    ASSEMBLY: tl.constexpr = FORM[7]
    PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES
    SUMS: tl.constexpr = GROUPS > 0 and KIND != 3 and not ROUND  # are multiplied by scales
    HAS_PARTS: tl.constexpr = SUMS and ASSEMBLY and KIND == 2 and ZEROS != 1
    PARTS: tl.constexpr = HAS_PARTS and xs[0].dtype == tl.bfloat16
    of_slice = zeros
    if ZEROS == 1:
        of_slice = zeros[0], zeros[1 // PER], zeros[2 // PER], zeros[3 // PER]
    if PARTS:
        tiles = int4_parts(words)
    else:
        tiles = numbers(words, of_slice, KIND, xs[0].dtype, ZEROS == 1, ASSEMBLY)
    if SUMS:
        for g in tl.static_range(GROUPS):
            part = tl.dot(_side_by_side(tiles, g * PER, PER), xs[g].T)
            scale = scales[g].to(tl.float32)
            acc += (scale * (64.0 if PARTS else 1.0))[:, None] * part
            if ZEROS == 2:
                offset = zeros[g].to(tl.float32)
                if KIND == 2:
                    offset += 8.0 * scale
                acc += offset[:, None] * tl.sum(xs[g].to(tl.float32), 1)[None, :]
                if ASSEMBLY:  # reads the sum, so that fewer sums are in registers at once
                    tl.inline_asm_elementwise("", "=r,f", [acc], tl.int32, is_pure=False, pack=1)
    else:
        made = ()
        for i in tl.static_range(SLICES):
            if KIND == 3:
                made += (scaled(tiles[i], scales[i], E8M0),)
            elif GROUPS == 0:
                made += (tiles[i],)
            else:
                offset = scales[i // PER].to(tl.float32)
                if ZEROS == 2:
                    offset = zeros[i // PER].to(tl.float32)
                    if KIND == 2:
                        offset += 8.0 * scales[i // PER].to(tl.float32)
                made += (_rounded(tiles[i], scales[i // PER], offset, ZEROS == 2),)
        acc = tl.dot(_side_by_side(made, 0, SLICES), xs[0].T, acc)
        if ASSEMBLY:  # reads the sum
            tl.inline_asm_elementwise("", "=r,f", [acc], tl.int32, is_pure=False, pack=1)
    return acc


@triton.jit
def add_products(
    acc,  # [BLOCK_N, BLOCK_M]
    words,  # [BLOCK_N, WIDTH]
    xs,  # tuple of [BLOCK_M, WIDTH], a slice of x for each slice of the words
    scales,  # tuple: [BLOCK_N] for each group, or of "fp4" [BLOCK_N, 64 / GROUP] for each slice
    zeros,  # tuple: [BLOCK_N] for each group, zeros or offsets
    FORM: tl.constexpr,  # SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, ROUND, ASSEMBLY
):
    """Add the products of a span to the sums.

    Scales of groups multiply the sums over their columns; or, with ROUND, the numbers, which are
    rounded then. That is for tiles whose second set of sums the registers do not hold.

    Offsets are multiplied with the sum of a group's inputs, those of "int4" with 8 scales more,
    since 8 is subtracted from its codes.
    """
    SLICES: tl.constexpr = FORM[0]
    GROUPS: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    E8M0: tl.constexpr = FORM[4]
    ZEROS: tl.constexpr = FORM[5]
    ROUND: tl.constexpr = FORM[6]
    ASSEMBLY: tl.constexpr = FORM[7]
    PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES  # slices of a group
    # Numbers are divided by 64 where sums are multiplied by scales anyway.
    PARTS: tl.constexpr = (
        ASSEMBLY and KIND == 2 and GROUPS > 0 and ZEROS != 1 and not ROUND
    ) and xs[0].dtype == tl.bfloat16
    of_slice = zeros
    if ZEROS == 1:
        of_slice = zeros[0], zeros[1 // PER], zeros[2 // PER], zeros[3 // PER]
    if PARTS:
        tiles = int4_parts(words)
    else:
        tiles = numbers(words, of_slice, KIND, xs[0].dtype, ZEROS == 1, ASSEMBLY)
    if KIND == 3:
        for i in tl.static_range(SLICES):
            acc = tl.dot(scaled(tiles[i], scales[i], E8M0), xs[i].T, acc)
    elif GROUPS > 0 and ROUND:
        for i in tl.static_range(SLICES):
            scale = scales[i // PER]
            offset = scale.to(tl.float32)
            if ZEROS == 2:
                offset = zeros[i // PER].to(tl.float32)
                if KIND == 2:
                    offset += 8.0 * scale.to(tl.float32)
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
            acc += (scale * (64.0 if PARTS else 1.0))[:, None] * part
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
def excess_of_spans(
    xts,  # tuple of 4: [SPANS, 64, 8 or BLOCK_M], see `add_spans`
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,  # the 4 are the same
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """What the constants in codes of "int4" add to the products of a step, negative: a tuple of 4.

    With zeros, which differ by row, it is the sum of the inputs instead. Of other kinds, nothing.
    """
    dtype: tl.constexpr = xts[0].dtype
    if RAW:
        constant: tl.constexpr = 1.0 if ZEROS else -136.0 if ASSEMBLY else -8.0
        same = tl.full([xts[0].shape[0], BLOCK_N, 64], constant, dtype)
        a = tl.dot(same, xts[0])
        excess = a, a, a, a
        if not SHARED:
            excess = a, tl.dot(same, xts[1]), tl.dot(same, xts[2]), tl.dot(same, xts[3])
    else:
        excess = xts
    return excess


@triton.jit
def _add_codes(
    sums, words, xts, excess, scales, zeros,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`add_spans` for "int4" whose codes keep the constant of the assembly."""
    PER: tl.constexpr = 4 // GROUPS if GROUPS > 0 else 4
    base: tl.constexpr = 128.0 if ASSEMBLY else 0.0
    codes = int4_codes(words, xts[0].dtype, ASSEMBLY)
    added = ()
    for i in tl.static_range(4):
        if ZEROS:
            less = (zeros[i // PER].to(tl.float32) + base)[:, :, None]
            part = tl.dot(codes[i], xts[i]) - less * excess[i]
        else:
            part = tl.dot(codes[i], xts[i], excess[i])
        if GROUPS > 0:
            part *= scales[i // PER].to(tl.float32)[:, :, None]
        added += (sums[i] + part,)
    return added


@triton.jit
def add_spans(
    sums,  # tuple of 4: [SPANS, BLOCK_N, 8], of which column i of the i-th counts
    words,  # [SPANS, BLOCK_N, 64]
    xts,  # tuple of 4: [SPANS, 64, 8 or BLOCK_M], the right operand of each slice
    excess,  # see `excess_of_spans`
    scales,  # tuple of 4, see `of_spans`
    zeros,
    FORM: tl.constexpr,  # SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, RAW, ASSEMBLY
):
    """Add the products of a step.

    If RAW, codes of "int4" are multiplied with the constant that the assembly adds to them, and its
    product with the inputs is subtracted: that replaces a subtraction for each weight by one tensor
    operation for many. Numbers and products are exact either way; only sums are rounded.
    """
    SLICES: tl.constexpr = FORM[0]
    GROUPS: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    E8M0: tl.constexpr = FORM[4]
    ZEROS: tl.constexpr = FORM[5]
    RAW: tl.constexpr = FORM[6]
    ASSEMBLY: tl.constexpr = FORM[7]
    added = ()
    if RAW:
        added = _add_codes(sums, words, xts, excess, scales, zeros, GROUPS, ZEROS, ASSEMBLY)
    else:
        PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES  # slices of a group
        of_slice = scales
        if ZEROS:
            of_slice = zeros[0], zeros[1 // PER], zeros[2 // PER], zeros[3 // PER]
        tiles = numbers(words, of_slice, KIND, xts[0].dtype, ZEROS, ASSEMBLY)
        for i in tl.static_range(4):
            if i >= SLICES:
                added += (sums[i],)
            elif KIND == 3:
                added += (tl.dot(scaled(tiles[i], scales[i], E8M0), xts[i], sums[i]),)
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
