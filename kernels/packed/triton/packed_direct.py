"""Triton linear layer for one row with quantised weights that go straight to registers.

Each lane loads 16 bytes of a weight row at once: whole operands of the tensor cores, because the
products of a row may be added in any order of columns, if the input has the same order. So words
pass neither shared memory nor other lanes, and the first ones arrive before the input is ready.
Each warp multiplies its own spans of columns, and the sums of the warps are added at the end.

Codes become floats by masks alone, without a subtraction or a product (see `scaled_numbers`), and
powers of 2 in the input and in the sums make up for it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...linear.linear import Norm
from ...linear.triton.gemv import gated
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_codes import scaled_numbers, sum_factor
from ..kinds import GATE_UP, PARTS, PLAIN, WIDTH, Direct, fits_direct
from .arguments import empty_output, parts_of, product_arguments, scale_arguments, taken
from .packed_lanes import (
    lanes_of,
    left_operand,
    load_tile,
    right_operand,
    rows_of_tile,
    wide,
    words_of,
)

INPUT_FACTOR = tl.constexpr(2.0**60)  # of inputs in bfloat16, which have the exponents of float32


@triton.jit
def _load(
    pointers,  # of a tile: to words of rows 0 to 7 and 8 to 15, to scales, to zeros
    rows_inside, stride, zero_stride, span, step, last,
    SPANS: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the step from `span + step` needs of 16 weight rows: 4 tiles of pairs of words, 4 scales
    [SPANS, 16] and 4 zeros, one for each slice or its group."""
    s = span + step + tl.arange(0, SPANS)
    inside = rows_inside[0][:, None, None] & (s < last)[None, :, None]
    inside_high = rows_inside[1][:, None, None] & (s < last)[None, :, None]
    at = wide(span) * 32
    low, high = pointers[0] + at, pointers[1] + at
    loaded = (
        load_tile(low + step * 32, inside, MASKED, "evict_first"),
        load_tile(low + (step * 32 + 16), inside, MASKED, "evict_first"),
        load_tile(high + step * 32, inside_high, MASKED, "evict_first"),
        load_tile(high + (step * 32 + 16), inside_high, MASKED, "evict_first"),
    )
    is_in = (s < last)[:, None] & rows_inside[2][None, :]
    if GROUPS > 0:
        source = pointers[2] + wide(span) * (GROUPS * stride)
        for i in tl.static_range(4):
            group = source + (step * GROUPS + i * GROUPS // 4) * stride
            loaded += (load_tile(group, is_in, MASKED, ""),)
    else:
        loaded += (is_in, is_in, is_in, is_in)
    if ZEROS:
        source = pointers[3] + wide(span) * (GROUPS * zero_stride)
        for i in tl.static_range(4):
            group = source + (step * GROUPS + i * GROUPS // 4) * zero_stride
            loaded += (load_tile(group, is_in, MASKED, ""),)
    else:
        loaded += (is_in, is_in, is_in, is_in)
    return loaded


@triton.jit
def _input(
    lanes, gain_lanes, squares, span, step, last,
    SLICES: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The right operand of a step, times the norm's weight, and the sums of the input's squares."""
    SPANS: tl.constexpr = lanes.shape[1]
    inside = (span + step + tl.arange(0, SPANS) < last)[None, :, None]
    at = wide(span) * (64 * SLICES)
    x0 = load_tile(lanes + at + step * 64 * SLICES, inside, MASKED, "")
    x1 = load_tile(lanes + at + (step * 64 * SLICES + 32), inside, MASKED, "")
    factor: tl.constexpr = INPUT_FACTOR if SCALED else 1.0
    if NORM:
        a, b = x0.to(tl.float32), x1.to(tl.float32)
        squares += a * a + b * b
        a *= load_tile(gain_lanes + at + step * 64 * SLICES, inside, MASKED, "").to(tl.float32)
        b *= load_tile(gain_lanes + at + (step * 64 * SLICES + 32), inside, MASKED, "").to(
            tl.float32
        )
        x0, x1 = (a * factor).to(x0.dtype), (b * factor).to(x1.dtype)
    elif SCALED:
        x0, x1 = x0 * factor, x1 * factor
    return right_operand(x0, x1), squares


@triton.jit
def _excess(xt, ZEROS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The product of the input with the zero of "int4", negative, in the units of even and of odd
    slices; with zeros, which differ by row, with 1."""
    if ASSEMBLY:
        bits: tl.constexpr = 1 if ZEROS else -0x7FF8  # of a code
        same = tl.full([xt.shape[0], 16, 64], bits, tl.int16).to(xt.dtype, bitcast=True)
        even = tl.dot(same, xt)
        odd = even * 16.0
    else:
        number: tl.constexpr = 1.0 if ZEROS else -8.0
        even = tl.dot(tl.full([xt.shape[0], 16, 64], number, xt.dtype), xt)
        odd = even
    return even, odd


@triton.jit
def _add(
    sums, loaded, xt, even, odd,
    SLICES: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add the products of a step to the sums of each slice."""
    a0 = scaled_numbers(words_of(loaded[0]), KIND, xt.dtype, ASSEMBLY)
    a1 = scaled_numbers(words_of(loaded[1]), KIND, xt.dtype, ASSEMBLY)
    b0 = scaled_numbers(words_of(loaded[2]), KIND, xt.dtype, ASSEMBLY)
    b1 = scaled_numbers(words_of(loaded[3]), KIND, xt.dtype, ASSEMBLY)
    added = ()
    for i in tl.static_range(4):
        if i >= SLICES:
            added += (sums[i],)
        else:
            left = left_operand(a0[i], a1[i], b0[i], b1[i])
            if KIND == 2:
                excess = even
                if i % 2:
                    excess = odd
                if ZEROS:
                    less = loaded[8 + i * 4 // SLICES].to(tl.float32)[:, :, None]
                    part = tl.dot(left, xt) - less * excess
                else:
                    part = tl.dot(left, xt, excess)
                if GROUPS > 0:
                    part *= loaded[4 + i * 4 // SLICES].to(tl.float32)[:, :, None]
                added += (sums[i] + part,)
            elif GROUPS > 0:
                scale = loaded[4 + i * 4 // SLICES].to(tl.float32)[:, :, None]
                added += (sums[i] + scale * tl.dot(left, xt),)
            else:
                added += (tl.dot(left, xt, sums[i]),)
    return added


@triton.jit
def _total(sums, KIND: tl.constexpr, SLICES: tl.constexpr, FACTORS: tl.constexpr):
    """The sums [16] of all slices and spans: column i of the i-th."""
    column = tl.arange(0, 8)[None, None, :]
    total = tl.where(column == 0, sums[0] * FACTORS[0], 0.0)
    for i in tl.static_range(1, SLICES):
        total += tl.where(column == i, sums[i] * FACTORS[i], 0.0)
    return tl.sum(tl.sum(total, 2), 0)


@triton.jit
def _finish(
    y, n, inside, channel, bias, residual, out, part, num_outputs, scale,
    CHANNEL: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    MODE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the results [16] of rows n, or [8] gates times what is below them."""
    if NORM:  # the scale of the whole row is applied last
        y *= scale
    if CHANNEL:
        y *= tl.load(channel + n, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        if part == 0:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, 8])))
        own, below = tl.split(tl.trans(tl.reshape(n, [2, 8])))
        y = gated(gate, up, ACTIVATION)
        tl.store(out + own, y.to(out.dtype.element_ty), mask=own < num_outputs)
    else:
        if RESIDUAL:
            y += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + part * num_outputs + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["split_k"])
def _packed_direct_kernel(
    words,  # [N, W / 2] int32, pairs of words; gated: [2 N, W / 2]
    x,  # [K]
    gain,  # [K], weight of the norm
    scales,  # [groups, N / ROW_GROUP]
    zeros,  # [groups, N] uint8
    channel,  # [N] or [2 N], factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [N]
    out,  # [N], or [split_k, N] float32
    eps,
    num_outputs,  # N
    num_inputs,  # K
    num_words,  # W
    stride,  # of `scales`
    zero_stride,
    part_spans,  # of a part, a multiple of SPANS * AHEAD
    split_k,  # number of parts
    TILES: tl.constexpr,  # of 16 weight rows, in a program; gated: of 8 of gate and 8 of up
    SPANS: tl.constexpr,  # the warps
    AHEAD: tl.constexpr,  # steps whose words are in registers or on their way
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # in a span; 0 = the scales are in `channel`
    ZEROS: tl.constexpr,
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FACTORS: tl.constexpr,  # of the sums of each slice
    SCALED: tl.constexpr,  # the input is multiplied by INPUT_FACTOR
    EVEN: tl.constexpr,  # no row and no span is beyond the end
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    HEIGHT: tl.constexpr = 8 if MODE == 2 else 16
    part = tl.program_id(0) % split_k
    start = tl.program_id(0) // split_k * TILES * HEIGHT
    num_spans = num_words // 64
    first = part * part_spans
    last = tl.minimum(first + part_spans, num_spans)
    slices = tl.arange(0, 8) % SLICES  # more columns than slices are copies, which nothing reads
    lanes = lanes_of(x, slices, 64, 64 * SLICES, SPANS, 32)
    gain_lanes = lanes_of(gain, slices, 64, 64 * SLICES, SPANS, 32)
    pointers, insides, n = (), (), ()
    for t in tl.static_range(TILES):
        rows, low, high, inside = rows_of_tile(start + t * HEIGHT, num_outputs, MODE)
        n += (rows,)
        insides += (inside,)
        first_group = tl.arange(0, SPANS)[:, None] * GROUPS
        pointers += (
            (
                lanes_of(words, low, num_words // 2, 32, SPANS, 16),
                lanes_of(words, high, num_words // 2, 32, SPANS, 16),
                scales + (first_group * stride + (rows // ROW_GROUP)[None, :]),
                zeros + (first_group * zero_stride + rows[None, :]),
            ),
        )
    loaded = ()
    for u in tl.static_range(AHEAD):
        for t in tl.static_range(TILES):
            loaded += (
                _load(
                    *(pointers[t], insides[t], stride, zero_stride, first, u * SPANS, last),
                    *(SPANS, GROUPS, ZEROS, not EVEN),
                ),
            )
    wait_for_inputs(PDL)
    none = tl.zeros([SPANS, 16, 8], tl.float32)
    sums = ()
    for _ in tl.static_range(TILES):
        sums += ((none, none, none, none),)
    squares = tl.zeros([8, SPANS, 32], tl.float32)
    for span in range(first, last, SPANS * AHEAD):
        more = ()
        for u in tl.static_range(AHEAD):
            xt, squares = _input(
                *(lanes, gain_lanes, squares, span, u * SPANS, last),
                *(SLICES, NORM, SCALED, not EVEN),
            )
            even, odd = none, none
            if KIND == 2:
                even, odd = _excess(xt, ZEROS, ASSEMBLY)
            added = ()
            for t in tl.static_range(TILES):
                added += (
                    _add(
                        *(sums[t], loaded[u * TILES + t], xt, even, odd),
                        *(SLICES, GROUPS, KIND, ZEROS, ASSEMBLY),
                    ),
                )
                more += (
                    _load(
                        *(pointers[t], insides[t], stride, zero_stride, span + SPANS * AHEAD),
                        *(u * SPANS, last, SPANS, GROUPS, ZEROS, True),
                    ),
                )
            sums = added
        loaded = more
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) * (SLICES / 8) / num_inputs + eps)
    for t in tl.static_range(TILES):
        y = _total(sums[t], KIND, SLICES, FACTORS)
        _finish(
            *(y, n[t], insides[t][2], channel, bias, residual, out, part, num_outputs, scale),
            *(CHANNEL, NORM, BIAS, RESIDUAL, MODE, ACTIVATION),
        )


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Direct,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes; x [1, K] has the weight's order
    of columns."""
    assert x.shape[0] == 1 and x.stride(1) == 1 and weight.words.is_contiguous()
    assert fits_direct(weight) and (norm is None or mode != PARTS)
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    height = (8 if mode == GATE_UP else 16) * choice.tiles
    num_spans = weight.words.shape[1] // WIDTH
    step = choice.num_warps * choice.ahead
    split_k, part_spans = parts_of(num_spans, choice.split_k if mode == PARTS else 1, step)
    out = empty_output(x, num_outputs, mode, split_k)
    factors, scaled = sum_factor(weight.kind, x.dtype, not x.is_cpu, INPUT_FACTOR.value)
    arguments = product_arguments(x, weight, mode, bias, activation, norm, residual)
    _packed_direct_kernel[(triton.cdiv(num_outputs, height) * split_k,)](
        weight.words.view(torch.int32),
        x,
        out=out,
        part_spans=part_spans,
        split_k=split_k,
        **taken(_packed_direct_kernel, arguments | scale_arguments(weight, x)),
        TILES=choice.tiles,
        SPANS=choice.num_warps,
        AHEAD=choice.ahead,
        FACTORS=factors,
        SCALED=scaled,
        EVEN=num_outputs % height == 0 and num_spans % step == 0,
        num_warps=choice.num_warps,
        num_stages=1,
        **pdl_options(x),
    )
    return out


hash_functions(globals())
