"""Triton linear layer for few rows with quantised weights: as `skinny`, but with packed words.

A tile of words comes into shared memory through a TMA descriptor, is loaded in the order in which
wgmma wants its left operand, and becomes tiles of exact numbers in registers. Products are summed
in float32. Scales of "fp4" are multiplied with the numbers first, which is exact, too; the others
multiply the sums over their columns, so no weight is rounded, unless a program has 128 rows or more
(see `packed_products`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import (
    fetch_early,
    fits_tma,
    has_tma,
    hash_functions,
    pdl_options,
    wait_for_inputs,
)
from ...linear.linear import Norm
from ...linear.linear_choice import Skinny
from ...linear.triton.gemv import gated
from ...linear.triton.skinny import _tile
from ...quant.planes import LOW_SLICES
from ...quant.tiled import TiledWeight
from ...quant.triton.plane_scales import factors_of_slices, plane_factors
from ..choice import EXACT_ROWS
from ..kinds import GATE_UP, PARTS, PLAIN
from ..planes.triton.plane_products import add_planes, plane_tiles
from .arguments import empty_output, product_arguments, scale_arguments
from .packed_products import add_products, add_span


@triton.jit
def _inputs(
    source,
    gain,
    squares,
    row,
    k,
    num_rows,
    num_inputs,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    TMA: tl.constexpr,
):
    """A slice [BLOCK_M, WIDTH] of x, times the gain of the norm; and the sums of its squares."""
    x = _tile(source, row, k, num_rows, num_inputs, BLOCK_M, WIDTH, TMA and not NORM)
    if NORM:
        column = k + tl.arange(0, WIDTH)
        wide = x.to(tl.float32)
        squares += wide * wide
        g = tl.load(gain + column, mask=column < num_inputs, other=0.0).to(tl.float32)
        x = (wide * g[None, :]).to(x.dtype)
    return x, squares


@triton.jit
def _words(
    source, high_source, row, k, num_rows, num_words, num_high,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr,
    TMA: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The words of the span from column k; of two planes a tuple of tiles."""
    if KIND >= 4:
        tiles = plane_tiles(
            *(source, high_source, row, k, num_rows, num_words, num_high),
            *(BLOCK_N, KIND, TMA, ASSEMBLY),
        )
    else:
        tiles = _tile(source, row, k // SLICES, num_rows, num_words, BLOCK_N, WIDTH, TMA)
    return tiles


@triton.jit
def _added(acc, words, xs, scales, zeros, FORM: tl.constexpr, PRODUCTS: tl.constexpr):
    """`add_span`; or `add_products`, which adds each slice of rounded numbers by itself."""
    ROUND: tl.constexpr = FORM[6]
    if ROUND and PRODUCTS == FORM[0]:
        acc = add_products(acc, words, xs, scales, zeros, FORM)
    else:
        acc = add_span(acc, words, xs, scales, zeros, FORM)
    return acc


@triton.jit(do_not_specialize=["num_rows", "split_k"])
def _packed_kernel(
    w_source,  # descriptor of, or pointer to, the words [N, W]; gated: [2 N, W]
    x_source,  # descriptor of, or pointer to, x [M, K]
    words,  # pointer to the words
    gain,  # [K], weight of the norm
    scales,  # [groups, N / ROW_GROUP]; of "fp4" [N, groups]
    zeros,  # [groups, N] uint8, or offsets [groups, N]
    channel,  # [N] or [2 N], factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [M, N]
    out,  # [M, N], or [split_k, M, N] float32
    eps,
    num_rows,  # M
    num_outputs,  # N
    num_inputs,  # K
    num_words,  # W
    num_groups,
    stride,  # of `scales`
    zero_stride,
    super_scales,  # [ceil(K / 256), N], if scales are integers
    super_offsets,
    high_source,  # of two planes: descriptor of, or pointer to, the words of the second
    num_high,  # their words of a row
    span,  # columns of one part, a multiple of WIDTH * SLICES
    split_k,  # number of parts
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # groups in WIDTH * SLICES columns; 0 = the scales are in `channel`
    E8M0: tl.constexpr,  # scales of "fp4" are powers of 2, else e4m3
    STORED: tl.constexpr,  # of small groups, see `plane_scales`
    ZEROS: tl.constexpr,  # 0 = none, 1 = zeros, 2 = offsets
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    EARLY: tl.constexpr,  # words of a row prefetched before the input is ready
    DTYPE: tl.constexpr,
    ROUND: tl.constexpr,  # scales multiply numbers instead of sums, see `add_span`
    PRODUCTS: tl.constexpr,  # of a span, see `_added`
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    COLUMNS: tl.constexpr = WIDTH * SLICES
    CODES: tl.constexpr = 4 if KIND >= 4 else SLICES  # in a word of the first plane
    X_WIDTH: tl.constexpr = COLUMNS // PRODUCTS
    block = tl.program_id(1) // split_k  # consecutive programs read the same weights
    part = tl.program_id(1) % split_k
    n_start = block * BLOCK_N
    m_start = tl.program_id(0) * BLOCK_M
    k_start = part * span
    k_end = tl.minimum(k_start + span, num_inputs)
    n = n_start + tl.arange(0, BLOCK_N)
    m = m_start + tl.arange(0, BLOCK_M)
    up = n + num_outputs
    is_row = n < num_outputs
    total_rows = num_outputs
    if MODE == 2:
        total_rows = 2 * num_outputs
    if EARLY >= 64:
        line = k_start // CODES + tl.arange(0, EARLY // 64) * 64
        at = tl.minimum(n, num_outputs - 1)[:, None] * num_words + line[None, :]
        at = tl.minimum(at, num_outputs * num_words - 1)
        fetch_early(words + at)
        if MODE == 2:
            fetch_early(words + num_outputs * num_words + at)
    sizes = stride, zero_stride, num_groups, super_scales, super_offsets
    FACTORS: tl.constexpr = (KIND, GROUPS, GROUP, ROW_GROUP, ZEROS)
    FORM: tl.constexpr = (SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, ROUND, ASSEMBLY)
    s, z = plane_factors(scales, zeros, sizes, k_start, n, is_row, FACTORS, STORED)
    s_up, z_up = s, z
    if MODE == 2:
        s_up, z_up = plane_factors(scales, zeros, sizes, k_start, up, is_row, FACTORS, STORED)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_M, X_WIDTH], tl.float32)
    for k in range(k_start, k_end, COLUMNS):
        w = _words(
            *(w_source, high_source, n_start, k, total_rows, num_words, num_high),
            *(BLOCK_N, WIDTH, SLICES, KIND, TMA, ASSEMBLY),
        )
        xs = ()
        for i in tl.static_range(PRODUCTS):
            x, squares = _inputs(
                *(x_source, gain, squares, m_start, k + i * X_WIDTH, num_rows, num_inputs),
                *(BLOCK_M, X_WIDTH, NORM, TMA),
            )
            xs = xs + (x,)
        now, now_up, zero, zero_up = s, s_up, z, z_up
        ahead = k + COLUMNS
        more = is_row & (ahead < k_end)
        if GROUPS > 0 or KIND == 3:  # loaded a step ahead
            s, z = plane_factors(scales, zeros, sizes, ahead, n, more, FACTORS, STORED)
            if MODE == 2:
                s_up, z_up = plane_factors(scales, zeros, sizes, ahead, up, more, FACTORS, STORED)
        if KIND >= 4 and MODE != 2:
            acc = add_planes((acc,), (w,), xs, (now,), (zero,), FORM, STORED)[0]
        elif KIND < 4:
            now = factors_of_slices(now, GROUPS, STORED)
            if ZEROS == 2:
                zero = factors_of_slices(zero, GROUPS, STORED)
            acc = _added(acc, w, xs, now, zero, FORM, PRODUCTS)
        if MODE == 2:
            w_up = _words(
                *(w_source, high_source, num_outputs + n_start, k, total_rows, num_words),
                *(num_high, BLOCK_N, WIDTH, SLICES, KIND, TMA, ASSEMBLY),
            )
            if KIND >= 4:
                acc, acc_up = add_planes(
                    *((acc, acc_up), (w, w_up), xs, (now, now_up), (zero, zero_up), FORM, STORED)
                )
            else:
                now_up = factors_of_slices(now_up, GROUPS, STORED)
                if ZEROS == 2:
                    zero_up = factors_of_slices(zero_up, GROUPS, STORED)
                acc_up = _added(acc_up, w_up, xs, now_up, zero_up, FORM, PRODUCTS)

    inside = is_row[:, None] & (m < num_rows)[None, :]
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares, 1) / num_inputs + eps)
        acc *= scale[None, :]
        acc_up *= scale[None, :]
    if CHANNEL:
        acc *= tl.load(channel + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if MODE == 2:
            acc_up *= tl.load(channel + up, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        if part == 0:
            acc += tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
            if MODE == 2:
                acc_up += tl.load(bias + up, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if MODE == 2:
        acc = gated(acc, acc_up, ACTIVATION)
    if MODE == 1:
        tl.store(out + (part * num_rows + m)[None, :] * num_outputs + n[:, None], acc, mask=inside)
    else:
        at = m[None, :] * num_outputs + n[:, None]
        if RESIDUAL:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(DTYPE), mask=inside)


def _rounds(choice: Skinny, mode: int) -> bool:
    """Whether the registers of a program lack room for one more set of sums; never of tiles for
    the rows of a decode or verify step, which rounds no weight."""
    sums = choice.block_m * choice.block_n // (32 * choice.num_warps)  # of a thread
    return choice.block_m > EXACT_ROWS and sums * (2 if mode == GATE_UP else 1) > 64


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Skinny,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes; x [M, K] has the weight's order
    of columns. `tma` overrides whether descriptors load the tiles."""
    assert norm is None or choice.split_k == 1 or mode != PARTS
    assert x.is_contiguous() and weight.words.is_contiguous()
    num_rows, num_inputs = x.shape
    width, slices = weight.slice_width, weight.slices
    columns = width * slices
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    split_k = choice.split_k if mode == PARTS else 1
    span = triton.cdiv(triton.cdiv(num_inputs, split_k), columns) * columns
    out = empty_output(x, num_outputs, mode, split_k)
    if tma is None:
        tma = has_tma(x) and fits_tma(weight.words, x)
    w_source, x_source = weight.words, x
    high = weight.words if weight.high is None else weight.high
    high_source, num_high = high, high.shape[1]
    arguments, rounds = scale_arguments(weight, x), _rounds(choice, mode)
    codes = slices if weight.high is None else LOW_SLICES  # in a word
    if rounds and (weight.kind == "int4" or weight.high is not None):
        products = slices if weight.high is None else slices // LOW_SLICES
    else:
        products = 1 if rounds or weight.kind == "fp4" else max(arguments["GROUPS"], 1)
    if tma:
        w_source = TensorDescriptor.from_tensor(weight.words, [choice.block_n, width])
        if weight.high is not None:
            high_source = TensorDescriptor.from_tensor(high, [choice.block_n, width])
        if norm is None:
            x_source = TensorDescriptor.from_tensor(x, [choice.block_m, columns // products])
    options = pdl_options(x)
    early = choice.early if options["PDL"] else 0
    while early > span // codes:
        early //= 2
    blocks = triton.cdiv(num_outputs, choice.block_n)
    _packed_kernel[(triton.cdiv(num_rows, choice.block_m), blocks * split_k)](
        w_source,
        x_source,
        weight.words,
        out=out,
        high_source=high_source,
        num_high=num_high,
        span=span,
        split_k=split_k,
        **product_arguments(x, weight, mode, bias, activation, norm, residual),
        **arguments,
        BLOCK_N=choice.block_n,
        BLOCK_M=choice.block_m,
        WIDTH=width,
        TMA=tma,
        EARLY=early,
        ROUND=rounds,
        PRODUCTS=products,
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        **options,
    )
    return out


hash_functions(globals())
