"""Triton linear layer for one row with quantised weights, on the tensor cores.

Each warp multiplies its own spans of columns, as an entry of a batch of products, and the sums of
the warps are added at the end; so even 16 rows of weights keep several warps busy. The slices of a
span of x are the columns of the right operand. Each slice of the weights is multiplied with all of
them, and only its product with its own slice is kept: that wastes arithmetic that the tensor cores
have to spare, but needs one small tile of x, and gives independent chains of products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fetch_early, fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ...linear.triton.gemv import gated
from ...linear.triton.skinny import _TRITON_DTYPES
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_codes import KINDS, numbers
from ...quant.triton.packed_scales import fp4_of_spans, of_spans, scaled
from ..kinds import WIDTH, Row, fits_row

_PLAIN, _PARTS, _GATED = 0, 1, 2
Norm = tuple[Tensor, float]  # weight [K], eps
_EARLY_BYTES = 16 << 20  # a third of the L2 of an H100


@triton.jit
def _lines(
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
def _add_step(
    sums,  # tuple of 4: [SPANS, BLOCK_N, 8], of which column i of the i-th counts
    words,  # [SPANS, BLOCK_N, 64]
    xt,  # [SPANS, 64, 8]
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
    tiles = numbers(words, of_slice, KIND, xt.dtype, ZEROS, ASSEMBLY)
    added = ()
    for i in tl.static_range(4):
        if i >= SLICES:
            added += (sums[i],)
        elif KIND == 3:
            added += (tl.dot(scaled(tiles[i], scales[i], GROUP, E8M0), xt, sums[i]),)
        elif GROUPS == 0:
            added += (tl.dot(tiles[i], xt, sums[i]),)
        else:
            scale = scales[i // PER].to(tl.float32)
            added += (sums[i] + scale[:, :, None] * tl.dot(tiles[i], xt),)
    return added


@triton.jit
def _diagonal(sums, SLICES: tl.constexpr):
    """Column i of the i-th of 4 tiles [SPANS, BLOCK_N, 8], added up: [BLOCK_N]."""
    column = tl.arange(0, 8)[None, None, :]
    total = tl.where(column == 0, sums[0], 0.0)
    for i in tl.static_range(1, SLICES):
        total += tl.where(column == i, sums[i], 0.0)
    return tl.sum(tl.sum(total, 2), 0)


@triton.jit(do_not_specialize=["split_k"])
def _packed_row_kernel(
    w_source,  # descriptor of, or pointer to, the words [W / 64, N, 64]; gated: [W / 64, 2 N, 64]
    words,  # pointer to the words
    x_source,  # descriptor of, or pointer to, x [spans, slices, 64]
    gain_source,  # the same of the norm's weight
    scales,  # [groups, N / ROW_GROUP]; of "fp4" [N, groups]
    zeros,  # [groups, N] uint8
    channel,  # [N] or [2 N], factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [N]
    out,  # [N], or [split_k, N] float32
    eps,
    num_outputs,  # N
    num_inputs,  # K
    num_words,  # W
    num_groups,
    stride,  # of `scales`
    zero_stride,
    part_columns,  # a multiple of those of a step
    split_k,  # number of parts
    BLOCK_N: tl.constexpr,
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
    COUNT: tl.constexpr = GROUPS if GROUPS > 0 else 1
    COLUMNS: tl.constexpr = 64 * SLICES
    num_spans = num_words // 64
    s = (is_row,)
    s_up, z, z_up = s, s, s
    first = k_start // COLUMNS
    if KIND == 3:  # loaded a step ahead
        s = fp4_of_spans(scales, stride, first, n, is_row, num_groups, GROUP, SPANS)
        if MODE == 2:
            s_up = fp4_of_spans(scales, stride, first, up, is_row, num_groups, GROUP, SPANS)
    elif GROUPS > 0:
        s = of_spans(
            *(scales, stride, 1, first, n, is_row, num_groups),
            *(COUNT, COLUMNS, GROUP, ROW_GROUP, SPANS),
        )
        if MODE == 2:
            s_up = of_spans(
                *(scales, stride, 1, first, up, is_row, num_groups),
                *(COUNT, COLUMNS, GROUP, ROW_GROUP, SPANS),
            )
    if ZEROS:
        z = of_spans(
            *(zeros, zero_stride, 1, first, n, is_row, num_groups),
            *(COUNT, COLUMNS, GROUP, 1, SPANS),
        )
        if MODE == 2:
            z_up = of_spans(
                *(zeros, zero_stride, 1, first, up, is_row, num_groups),
                *(COUNT, COLUMNS, GROUP, 1, SPANS),
            )
    wait_for_inputs(PDL)
    none = tl.zeros([SPANS, BLOCK_N, 8], tl.float32)
    sums = none, none, none, none
    sums_up = sums
    squares = tl.zeros([SPANS, 8, 64], tl.float32)
    for span in range(first, tl.cdiv(k_end, COLUMNS), SPANS):
        w = _lines(
            *(w_source, span, n_start, num_spans, total_rows, 64, num_words),
            *(SPANS, BLOCK_N, TMA),
        )
        x = _lines(x_source, span, 0, num_spans, SLICES, COLUMNS, 64, SPANS, 8, TMA)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            g = _lines(gain_source, span, 0, num_spans, SLICES, COLUMNS, 64, SPANS, 8, TMA)
            x = (wide * g.to(tl.float32)).to(DTYPE)
        xt = tl.permute(x, (0, 2, 1))
        now, now_up, zero, zero_up = s, s_up, z, z_up
        ahead = span + SPANS
        more = is_row & (ahead * COLUMNS < k_end)
        if KIND == 3:
            s = fp4_of_spans(scales, stride, ahead, n, more, num_groups, GROUP, SPANS)
            if MODE == 2:
                s_up = fp4_of_spans(scales, stride, ahead, up, more, num_groups, GROUP, SPANS)
        elif GROUPS > 0:
            s = of_spans(
                *(scales, stride, 1, ahead, n, more, num_groups),
                *(COUNT, COLUMNS, GROUP, ROW_GROUP, SPANS),
            )
            if MODE == 2:
                s_up = of_spans(
                    *(scales, stride, 1, ahead, up, more, num_groups),
                    *(COUNT, COLUMNS, GROUP, ROW_GROUP, SPANS),
                )
            if ZEROS:
                z = of_spans(
                    *(zeros, zero_stride, 1, ahead, n, more, num_groups),
                    *(COUNT, COLUMNS, GROUP, 1, SPANS),
                )
                if MODE == 2:
                    z_up = of_spans(
                        *(zeros, zero_stride, 1, ahead, up, more, num_groups),
                        *(COUNT, COLUMNS, GROUP, 1, SPANS),
                    )
        sums = _add_step(
            *(sums, w, xt, now, zero, SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, ASSEMBLY)
        )
        if MODE == 2:
            w = _lines(
                *(w_source, span, num_outputs + n_start, num_spans, total_rows, 64, num_words),
                *(SPANS, BLOCK_N, TMA),
            )
            sums_up = _add_step(
                *(sums_up, w, xt, now_up, zero_up),
                *(SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, ASSEMBLY),
            )

    y = _diagonal(sums, SLICES)
    u = y
    if MODE == 2:
        u = _diagonal(sums_up, SLICES)
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares) / num_inputs + eps)
        y *= scale
        u *= scale
    if CHANNEL:
        y *= tl.load(channel + n, mask=is_row, other=0.0).to(tl.float32)
        if MODE == 2:
            u *= tl.load(channel + up, mask=is_row, other=0.0).to(tl.float32)
    if BIAS:
        if part == 0:
            y += tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
            if MODE == 2:
                u += tl.load(bias + up, mask=is_row, other=0.0).to(tl.float32)
    if MODE == 2:
        y = gated(y, u, ACTIVATION)
    if RESIDUAL:
        y += tl.load(residual + n, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + part * num_outputs + n, y.to(out.dtype.element_ty), mask=is_row)


def _launch(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    choice: Row,
    mode: int,
    activation: str = "silu",
    tma: bool | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    assert x.shape[0] == 1 and x.is_contiguous() and weight.words.is_contiguous()
    assert fits_row(weight) and (norm is None or mode != _PARTS)
    num_inputs, slices = x.shape[1], weight.slices
    num_outputs = weight.shape[0] // (2 if mode == _GATED else 1)
    split_k = choice.split_k if mode == _PARTS else 1
    columns = slices * WIDTH
    step = columns * choice.spans
    part_columns = triton.cdiv(triton.cdiv(num_inputs, split_k), step) * step
    if mode == _PARTS:
        out = torch.empty(split_k, 1, num_outputs, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    lines, gains = x.view(-1, slices, WIDTH), gain.view(-1, slices, WIDTH)
    words = weight.words.view(weight.words.shape[0], -1, WIDTH).transpose(0, 1)
    if tma is None:
        tma = has_tma(x) and fits_tma(weight.words, x, gain.view(1, -1))
    sources: tuple[object, ...] = (weight.words, weight.words, lines, gains)
    if tma:
        sources = (
            TensorDescriptor.from_tensor(words, [choice.spans, choice.block_n, WIDTH]),
            weight.words,
            TensorDescriptor.from_tensor(lines, [choice.spans, 8, WIDTH]),
            TensorDescriptor.from_tensor(gains, [choice.spans, 8, WIDTH]),
        )
    options = pdl_options(x)
    whole = weight.group >= weight.columns and weight.row_group == 1
    is_fp4, zeros = weight.kind == "fp4", weight.zeros
    factors = weight.scales if whole and not is_fp4 else weight.global_scale
    _packed_row_kernel[(triton.cdiv(num_outputs, choice.block_n) * split_k,)](
        *sources,
        weight.scales.view(torch.uint8) if is_fp4 else weight.scales,
        x if zeros is None else zeros,
        x if factors is None else factors,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        num_outputs,
        num_inputs,
        weight.words.shape[1],
        weight.scales.shape[1] if is_fp4 else weight.scales.shape[0],
        weight.scales.stride(0),
        0 if zeros is None else zeros.stride(0),
        part_columns,
        split_k,
        BLOCK_N=choice.block_n,
        SPANS=choice.spans,
        SLICES=slices,
        KIND=KINDS[weight.kind],
        GROUP=1 << 30 if whole and not is_fp4 else weight.group,
        ROW_GROUP=weight.row_group,
        GROUPS=0 if whole or is_fp4 else max(columns // weight.group, 1),
        E8M0=weight.scales.dtype == torch.uint8,
        ZEROS=zeros is not None,
        CHANNEL=factors is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        MODE=mode,
        ACTIVATION=int(activation == "gelu_tanh"),
        TMA=tma,
        EARLY=_early_lines(weight, part_columns) if options["PDL"] else 0,
        DTYPE=_TRITON_DTYPES[x.dtype],
        ASSEMBLY=not x.is_cpu,
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        **options,
    )
    return out


def _early_lines(weight: TiledWeight, columns: int) -> int:
    """Lines of a row to prefetch into L2 while the previous kernel runs: a power of 2, at most
    `_EARLY_BYTES` of the matrix and the row's part."""
    rows = weight.words.shape[0]
    most = min(_EARLY_BYTES // (128 * rows), columns // weight.slices // WIDTH)
    return 1 << most.bit_length() - 1 if most > 0 else 0


def linear(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    choice: Row,
    tma: bool | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.packed.linear.packed_linear`; x must be one row, [1, K]."""
    return _launch(x, weight, bias, choice, _PLAIN, tma=tma, norm=norm, residual=residual)


def linear_parts(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, choice: Row, tma: bool | None = None
) -> Tensor:
    """See `kernels.packed.linear.packed_linear_parts`."""
    return _launch(x, weight, bias, choice, _PARTS, tma=tma)


def gated_linear(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    activation: str,
    choice: Row,
    tma: bool | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """See `kernels.packed.linear.packed_gated_linear`."""
    return _launch(x, weight, bias, choice, _GATED, activation, tma=tma, norm=norm)


hash_functions(globals())
