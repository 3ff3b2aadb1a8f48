"""Loads scales and zeros of packed words, and multiplies the scales of "fp4" with numbers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions


@triton.jit
def of_span(
    source,  # [num_groups, N / ROW_GROUP]
    stride,
    k,
    n,
    inside,
    num_groups,
    GROUPS: tl.constexpr,  # in a span: 1, 2 or 4
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
):
    """Scales or zeros [BLOCK_N] of the groups of a span: a tuple of 4, of which GROUPS differ."""
    first = k // GROUP
    vectors = ()
    for i in tl.static_range(4):
        group = first + i % GROUPS
        at = source + group * stride + n // ROW_GROUP
        vectors += (tl.load(at, mask=inside & (group < num_groups), other=0),)
    return vectors


@triton.jit
def _times_super(vectors, supers, stride, k, n, inside):
    """A tuple of 4 times the super scale or offset of the 256 columns around k, in float32."""
    factor = tl.load(supers + k // 256 * stride + n, mask=inside, other=0).to(tl.float32)
    products = ()
    for i in tl.static_range(4):
        products += (vectors[i].to(tl.float32) * factor,)
    return products


@triton.jit
def fp4_scales(
    scales,  # [N, groups] uint8
    stride,
    k,
    n,
    inside,
    num_groups,
    GROUP: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Scales [BLOCK_N, 64 / GROUP] of each slice of the span from column k: a tuple of 4.

    NARROW: [BLOCK_N, 4] of each slice of four spans of 64 columns.
    """
    COUNT: tl.constexpr = 4 if NARROW else 64 // GROUP
    tiles = ()
    for i in tl.static_range(4):
        if NARROW:
            group = (k + tl.arange(0, COUNT) * 64 + i * 16) // GROUP
        else:
            group = k // GROUP + i * COUNT + tl.arange(0, COUNT)
        at = scales + n[:, None] * stride + group[None, :]
        tiles += (tl.load(at, mask=inside[:, None] & (group < num_groups)[None, :], other=0),)
    return tiles


@triton.jit
def factors_of(
    scales,
    zeros,
    sizes,  # stride of `scales`, stride of `zeros`, number of groups, super scales and offsets
    k,
    n,
    inside,
    FACTORS: tl.constexpr,  # KIND, GROUPS in a span (0 = of whole rows), GROUP, ROW_GROUP, ZEROS
    NARROW: tl.constexpr = False,
):
    """The scales and the zeros or offsets of the span from column k, each a tuple of 4.

    Scales that are integers of 8 bits are multiplied by super scales [ceil(K / 256), N], and so are
    offsets.
    """
    KIND: tl.constexpr = FACTORS[0]
    GROUPS: tl.constexpr = FACTORS[1]
    GROUP: tl.constexpr = FACTORS[2]
    ROW_GROUP: tl.constexpr = FACTORS[3]
    ZEROS: tl.constexpr = FACTORS[4]
    SUPER: tl.constexpr = KIND != 3 and scales.dtype.element_ty.primitive_bitwidth == 8
    stride, zero_stride, num_groups = sizes[0], sizes[1], sizes[2]
    s = inside, inside, inside, inside
    z = s
    if KIND == 3:
        s = fp4_scales(scales, stride, k, n, inside, num_groups, GROUP, NARROW)
    elif GROUPS > 0:
        s = of_span(scales, stride, k, n, inside, num_groups, GROUPS, GROUP, ROW_GROUP)
        if SUPER:
            s = _times_super(s, sizes[3], stride, k, n, inside & (k // GROUP < num_groups))
    if ZEROS:
        COUNT: tl.constexpr = GROUPS if GROUPS > 0 else 1
        z = of_span(zeros, zero_stride, k, n, inside, num_groups, COUNT, GROUP, 1)
        if SUPER and ZEROS == 2:
            z = _times_super(z, sizes[4], stride, k, n, inside & (k // GROUP < num_groups))
    return s, z


@triton.jit
def scaled(tile, scales, E8M0: tl.constexpr):
    """Numbers [BLOCK_N, 64] of "fp4" times scales [BLOCK_N, groups] uint8. It is exact."""
    COUNT: tl.constexpr = scales.shape[len(scales.shape) - 1]
    if E8M0:  # 0 is 2 ** -127
        bits = tl.maximum(scales.to(tl.int32) << 7, 64).to(tl.int16)
        scales = bits.to(tl.bfloat16, bitcast=True).to(tile.dtype)
    else:
        scales = scales.to(tl.float8e4nv, bitcast=True).to(tile.dtype)
    wide = tl.expand_dims(scales, -1)
    if len(tile.shape) == 3:
        factors = tl.broadcast_to(wide, [tile.shape[0], tile.shape[1], COUNT, 64 // COUNT])
    else:
        factors = tl.broadcast_to(wide, [tile.shape[0], COUNT, 64 // COUNT])
    return tile * tl.reshape(factors, tile.shape)


@triton.jit
def _of_spans(
    source,
    stride,
    span,
    n,
    inside,
    num_groups,
    COUNT: tl.constexpr,
    SPAN_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Scales or zeros [SPANS, BLOCK_N] of the COUNT groups of each span: a tuple of 4."""
    first = (span + tl.arange(0, SPANS)) * SPAN_COLUMNS // GROUP
    vectors = ()
    for i in tl.static_range(4):
        group = first + i % COUNT
        at = group[:, None] * stride + (n // ROW_GROUP)[None, :]
        is_in = (group < num_groups)[:, None] & inside[None, :]
        vectors += (tl.load(source + at, mask=is_in, other=0),)
    return vectors


@triton.jit
def _fp4_of_spans(
    source, row_stride, span, n, inside, num_groups, GROUP: tl.constexpr, SPANS: tl.constexpr
):
    """Scales [SPANS, BLOCK_N, 64 / GROUP] of each slice of each span of "fp4": a tuple of 4."""
    COUNT: tl.constexpr = 64 // GROUP
    vectors = ()
    for i in tl.static_range(4):
        first = ((span + tl.arange(0, SPANS)) * 4 + i) * COUNT
        group = first[:, None, None] + tl.arange(0, COUNT)[None, None, :]
        at = n[None, :, None] * row_stride + group
        is_in = (group < num_groups) & inside[None, :, None]
        vectors += (tl.load(source + at, mask=is_in, other=0),)
    return vectors


@triton.jit
def factors_of_spans(
    scales,
    zeros,
    sizes,  # stride of `scales`, stride of `zeros`, number of groups
    span,
    n,
    inside,
    FACTORS: tl.constexpr,  # as of `factors_of`
    COLUMNS: tl.constexpr,  # of a span
    SPANS: tl.constexpr,
):
    """The scales and the zeros of SPANS spans, each a tuple of 4: [SPANS, BLOCK_N], or for "fp4"
    [SPANS, BLOCK_N, 64 / GROUP]."""
    KIND: tl.constexpr = FACTORS[0]
    GROUPS: tl.constexpr = FACTORS[1]
    GROUP: tl.constexpr = FACTORS[2]
    ROW_GROUP: tl.constexpr = FACTORS[3]
    ZEROS: tl.constexpr = FACTORS[4]
    COUNT: tl.constexpr = GROUPS if GROUPS > 0 else 1
    stride, zero_stride, num_groups = sizes
    s = inside, inside, inside, inside
    z = s
    if KIND == 3:
        s = _fp4_of_spans(scales, stride, span, n, inside, num_groups, GROUP, SPANS)
    elif GROUPS > 0:
        s = _of_spans(
            *(scales, stride, span, n, inside, num_groups),
            *(COUNT, COLUMNS, GROUP, ROW_GROUP, SPANS),
        )
    if ZEROS:
        z = _of_spans(
            *(zeros, zero_stride, span, n, inside, num_groups),
            *(COUNT, COLUMNS, GROUP, 1, SPANS),
        )
    return s, z


hash_functions(globals())
