"""Triton linear layer for up to 16 rows with quantised weights, on the tensor cores.

Each warp multiplies its own spans of columns, as an entry of a batch of products, and the sums of
the warps are added at the end; so even 16 rows of weights keep several warps busy. Of a single row
of x, the slices of a span are the columns of the right operand. Each slice of the weights is
multiplied with all of them, and only its product with its own slice is kept: that wastes arithmetic
that the tensor cores have to spare, but needs one small tile of x.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fetch_early, fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ...linear.linear import Norm
from ...linear.triton.gemv import gated
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_scales import factors_of_spans
from ..kinds import GATE_UP, PARTS, PLAIN, WIDTH, Row, fits_row
from .arguments import empty_output, product_arguments, scale_arguments, taken
from .packed_products import add_spans, excess_of_spans, tile_of_spans, total_of_spans


@triton.jit(do_not_specialize=["num_rows", "split_k"])
def _packed_row_kernel(
    w_source,  # descriptor of, or pointer to, the words [W / 64, N, 64]; gated: [W / 64, 2 N, 64]
    words,  # pointer to the words
    x_source,  # of one row: descriptor of, or pointer to, x [spans, slices, 64]
    x1_source,  # of more rows: `x_source` and these describe, or point to, x [spans, M, 64] of
    x2_source,  # the slices
    x3_source,
    gain_source,  # the same of the norm's weight
    scales,  # [groups, N / ROW_GROUP]; of "fp4" [N, groups]
    zeros,  # [groups, N] uint8
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
    part_columns,  # a multiple of those of a step
    split_k,  # number of parts
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least M; 0 = M is 1
    SPANS: tl.constexpr,  # of a step
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # groups in 64 * SLICES columns; 0 = the scales are in `channel`
    E8M0: tl.constexpr,
    ZEROS: tl.constexpr,
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    EARLY: tl.constexpr,  # lines of 128 bytes of a row prefetched before the input is ready
    DTYPE: tl.constexpr,
    RAW: tl.constexpr,  # codes of "int4" keep the constant that the assembly adds
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0) % split_k
    n_start = tl.program_id(0) // split_k * BLOCK_N
    k_start = part * part_columns
    k_end = tl.minimum(k_start + part_columns, num_inputs)
    n = n_start + tl.arange(0, BLOCK_N)
    up = n + num_outputs
    is_row = n < num_outputs
    total_rows = num_outputs
    if MODE == 2:
        total_rows = 2 * num_outputs
    if EARLY > 0:
        line = k_start // SLICES + tl.arange(0, EARLY) * 64
        at = tl.minimum(n, num_outputs - 1)[:, None] * num_words + line[None, :]
        at = tl.minimum(at, num_outputs * num_words - 1)
        fetch_early(words + at)
        if MODE == 2:
            fetch_early(words + num_outputs * num_words + at)
    COLUMNS: tl.constexpr = 64 * SLICES
    num_spans = num_words // 64
    first = k_start // COLUMNS
    sizes = stride, zero_stride, num_groups
    FACTORS: tl.constexpr = (KIND, GROUPS, GROUP, ROW_GROUP, ZEROS)
    FORM: tl.constexpr = (SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, RAW, ASSEMBLY)
    s, z = factors_of_spans(scales, zeros, sizes, first, n, is_row, FACTORS, COLUMNS, SPANS)
    s_up, z_up = s, z
    if MODE == 2:
        s_up, z_up = factors_of_spans(
            scales, zeros, sizes, first, up, is_row, FACTORS, COLUMNS, SPANS
        )
    wait_for_inputs(PDL)
    none = tl.zeros([SPANS, BLOCK_N, 8 if BLOCK_M == 0 else BLOCK_M], tl.float32)
    sums = none, none, none, none
    sums_up = sums
    squares = tl.zeros([SPANS, 8, 64], tl.float32)
    for span in range(first, tl.cdiv(k_end, COLUMNS), SPANS):
        w = tile_of_spans(
            *(w_source, span, n_start, num_spans, total_rows, 64, num_words),
            *(SPANS, BLOCK_N, TMA),
        )
        if BLOCK_M == 0:
            x = tile_of_spans(x_source, span, 0, num_spans, SLICES, COLUMNS, 64, SPANS, 8, TMA)
            if NORM:
                wide = x.to(tl.float32)
                squares += wide * wide
                g = tile_of_spans(
                    gain_source, span, 0, num_spans, SLICES, COLUMNS, 64, SPANS, 8, TMA
                )
                x = (wide * g.to(tl.float32)).to(DTYPE)
            xt = tl.permute(x, (0, 2, 1))
            xts = xt, xt, xt, xt
        else:
            place = span, 0, num_spans, num_rows, COLUMNS, num_inputs
            a = tl.permute(tile_of_spans(x_source, *place, SPANS, BLOCK_M, TMA), (0, 2, 1))
            b = tl.permute(tile_of_spans(x1_source, *place, SPANS, BLOCK_M, TMA), (0, 2, 1))
            xts = a, b, b, b
            if SLICES == 4:
                c = tl.permute(tile_of_spans(x2_source, *place, SPANS, BLOCK_M, TMA), (0, 2, 1))
                d = tl.permute(tile_of_spans(x3_source, *place, SPANS, BLOCK_M, TMA), (0, 2, 1))
                xts = a, b, c, d
        now, now_up, zero, zero_up = s, s_up, z, z_up
        ahead = span + SPANS
        more = is_row & (ahead * COLUMNS < k_end)
        if GROUPS > 0 or KIND == 3:  # loaded a step ahead
            s, z = factors_of_spans(scales, zeros, sizes, ahead, n, more, FACTORS, COLUMNS, SPANS)
            if MODE == 2:
                s_up, z_up = factors_of_spans(
                    scales, zeros, sizes, ahead, up, more, FACTORS, COLUMNS, SPANS
                )
        excess = excess_of_spans(xts, BLOCK_N, BLOCK_M == 0, RAW, ZEROS, ASSEMBLY)
        sums = add_spans(sums, w, xts, excess, now, zero, FORM)
        if MODE == 2:
            w = tile_of_spans(
                *(w_source, span, num_outputs + n_start, num_spans, total_rows, 64, num_words),
                *(SPANS, BLOCK_N, TMA),
            )
            sums_up = add_spans(sums_up, w, xts, excess, now_up, zero_up, FORM)

    y = total_of_spans(sums, SLICES, BLOCK_M)
    u = y
    if MODE == 2:
        u = total_of_spans(sums_up, SLICES, BLOCK_M)
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares) / num_inputs + eps)
        y *= scale
        u *= scale
    if CHANNEL:
        y *= tl.load(channel + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if MODE == 2:
            u *= tl.load(channel + up, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        if part == 0:
            y += tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
            if MODE == 2:
                u += tl.load(bias + up, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if MODE == 2:
        y = gated(y, u, ACTIVATION)
    m = tl.arange(0, 1 if BLOCK_M == 0 else BLOCK_M)
    at = m[None, :] * num_outputs + n[:, None]
    inside = is_row[:, None] & (m < num_rows)[None, :]
    size = num_rows * num_outputs
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + part * size + at, y.to(out.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Row,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes; x [M, K] has the weight's order
    of columns and up to 16 rows. `tma` overrides whether descriptors load the tiles."""
    assert x.is_contiguous() and weight.words.is_contiguous() and fits_row(weight)
    (num_rows, num_inputs), slices = x.shape, weight.slices
    assert norm is None or (mode != PARTS and num_rows == 1)
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    num_blocks = triton.cdiv(num_outputs, choice.block_n)
    split_k = choice.split_k if mode == PARTS else 1
    columns = slices * WIDTH
    step = columns * choice.spans
    part_columns = triton.cdiv(triton.cdiv(num_inputs, split_k), step) * step
    out = empty_output(x, num_outputs, mode, split_k)
    gain = x[0] if norm is None else norm[0]
    block_m = 0 if num_rows == 1 else max(8, triton.next_power_of_2(num_rows))
    words = weight.words.view(weight.words.shape[0], -1, WIDTH).transpose(0, 1)
    lines, gains = x.view(num_rows, -1, slices, WIDTH), gain.view(-1, slices, WIDTH)
    tiles = [lines[:, :, i % slices].transpose(0, 1) for i in range(4)]  # [spans, M, 64]
    if num_rows == 1:
        tiles[0] = lines[0]
    if tma is None:
        tma = has_tma(x) and fits_tma(weight.words, x, gain.view(1, -1))
    sources: list[object] = [words, words, *tiles, gains]
    if tma:
        height = block_m or 8
        blocks = (choice.block_n, 0, *(height,) * 4, 8)
        sources = [
            TensorDescriptor.from_tensor(tensor, [choice.spans, block, WIDTH]) if block else tensor
            for tensor, block in zip((words, words, *tiles, gains), blocks, strict=True)
        ]
    sources[1] = weight.words
    options = pdl_options(x)
    arguments = product_arguments(x, weight, mode, bias, activation, norm, residual)
    _packed_row_kernel[(num_blocks * split_k,)](
        *sources,
        out=out,
        part_columns=part_columns,
        split_k=split_k,
        **taken(_packed_row_kernel, arguments | scale_arguments(weight, x)),
        BLOCK_N=choice.block_n,
        BLOCK_M=block_m,
        SPANS=choice.spans,
        TMA=tma,
        EARLY=_early_lines(weight, part_columns, choice.early) if options["PDL"] else 0,
        # of float16 the constant is so large that sums would lose bits
        RAW=weight.kind == "int4" and (x.dtype == torch.bfloat16 or x.is_cpu),
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        **options,
    )
    return out


def _early_lines(weight: TiledWeight, columns: int, early: int) -> int:
    """Lines of a row to prefetch into L2 while the previous kernel runs: a power of 2, at most
    `early` MiB of the matrix and the row's part."""
    rows = weight.words.shape[0]
    most = min((early << 20) // (128 * rows), columns // weight.slices // WIDTH)
    return 1 << most.bit_length() - 1 if most > 0 else 0


hash_functions(globals())
