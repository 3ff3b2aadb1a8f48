"""Triton linear layer for one row with quantised weights, on the tensor cores.

A step multiplies 512 columns. Their 8 slices of x are the 8 columns of the right operand, and each
slice of the weights is multiplied with all of them: only the sums of a slice with itself are kept.
That wastes arithmetic that the tensor cores have to spare, but needs one small tile of x, and gives
8 independent chains of products. Few rows of weights in a program keep all multiprocessors busy.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ...linear.triton.gemv import gated
from ...linear.triton.skinny import _TRITON_DTYPES, _tile
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_codes import KINDS, numbers
from ...quant.triton.packed_scales import fp4_scales, of_span, scaled
from ..kinds import WIDTH, Row, fits_row

_PLAIN, _PARTS, _GATED = 0, 1, 2
Norm = tuple[Tensor, float]  # weight [K], eps
STEP = 512  # columns


@triton.jit
def _factors(
    source,
    stride,
    k,
    n,
    inside,
    num_groups,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    FP4: tl.constexpr,
):
    """Scales or zeros of the spans of a step, 4 for each span."""
    vectors = ()
    for s in tl.static_range(8 // SLICES):
        at = k + s * 64 * SLICES
        if FP4:
            vectors += fp4_scales(source, stride, at, n, inside, num_groups, GROUP)
        else:
            vectors += of_span(source, stride, at, n, inside, num_groups, GROUPS, GROUP, ROW_GROUP)
    return vectors


@triton.jit
def _add_step(
    sums,  # tuple of 8: [BLOCK_N, 8], of which column c of the c-th counts
    source,  # of words
    row,
    k,
    total_rows,
    num_words,
    xt,  # [64, 8]
    scales,
    zeros,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ZEROS: tl.constexpr,
    TMA: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Add the products of a step."""
    PER: tl.constexpr = SLICES // GROUPS if GROUPS > 0 else SLICES  # slices of a group
    added = ()
    for s in tl.static_range(8 // SLICES):
        words = _tile(source, row, k // SLICES + s * 64, total_rows, num_words, BLOCK_N, 64, TMA)
        zero = scales
        if ZEROS:
            zero = (
                zeros[4 * s],
                zeros[4 * s + 1 // PER],
                zeros[4 * s + 2 // PER],
                zeros[4 * s + 3 // PER],
            )
        tiles = numbers(words, zero, KIND, xt.dtype, ZEROS, ASSEMBLY)
        for i in tl.static_range(SLICES):
            before = sums[s * SLICES + i]
            if KIND == 3:
                tile = scaled(tiles[i], scales[4 * s + i], GROUP, E8M0)
                added += (tl.dot(tile, xt, before),)
            elif GROUPS == 0:
                added += (tl.dot(tiles[i], xt, before),)
            else:
                scale = scales[4 * s + i // PER].to(tl.float32)
                added += (before + scale[:, None] * tl.dot(tiles[i], xt),)
    return added


@triton.jit
def _diagonal(sums, BLOCK_N: tl.constexpr):
    """Column c of the c-th of 8 tiles [BLOCK_N, 8], added up: [BLOCK_N]."""
    column = tl.arange(0, 8)[None, :]
    total = tl.zeros([BLOCK_N, 8], tl.float32)
    for c in tl.static_range(8):
        total += tl.where(column == c, sums[c], 0.0)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["split_k"])
def _packed_row_kernel(
    w_source,  # descriptor of, or pointer to, the words [N, W]; gated: [2 N, W]
    x_source,  # descriptor of, or pointer to, x [K / 64, 64]
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
    span,  # columns of one part, a multiple of 512
    split_k,  # number of parts
    BLOCK_N: tl.constexpr,
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
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0) % split_k
    n_start = tl.program_id(0) // split_k * BLOCK_N
    k_start = part * span
    k_end = tl.minimum(k_start + span, num_inputs)
    n = n_start + tl.arange(0, BLOCK_N)
    up = n + num_outputs
    is_row = n < num_outputs
    total_rows = num_outputs
    if MODE == 2:
        total_rows = 2 * num_outputs
    COUNT: tl.constexpr = GROUPS if GROUPS > 0 else 1
    FP4: tl.constexpr = KIND == 3
    s = (is_row,)
    s_up, z, z_up = s, s, s
    if GROUPS > 0 or FP4:  # loaded a step ahead
        s = _factors(
            *(scales, stride, k_start, n, is_row, num_groups),
            *(SLICES, COUNT, GROUP, ROW_GROUP, FP4),
        )
        if MODE == 2:
            s_up = _factors(
                *(scales, stride, k_start, up, is_row, num_groups),
                *(SLICES, COUNT, GROUP, ROW_GROUP, FP4),
            )
    if ZEROS:
        z = _factors(
            zeros, zero_stride, k_start, n, is_row, num_groups, SLICES, COUNT, GROUP, 1, False
        )
        if MODE == 2:
            z_up = _factors(
                zeros, zero_stride, k_start, up, is_row, num_groups, SLICES, COUNT, GROUP, 1, False
            )
    wait_for_inputs(PDL)
    none = tl.zeros([BLOCK_N, 8], tl.float32)
    sums = none, none, none, none, none, none, none, none
    sums_up = sums
    squares = tl.zeros([8, 64], tl.float32)
    for k in range(k_start, k_end, 512):
        x = _tile(x_source, k // 64, 0, num_inputs // 64, 64, 8, 64, TMA)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            g = _tile(gain_source, k // 64, 0, num_inputs // 64, 64, 8, 64, TMA)
            x = (wide * g.to(tl.float32)).to(DTYPE)
        xt = x.T
        now, now_up, zero, zero_up = s, s_up, z, z_up
        ahead = k + 512
        more = is_row & (ahead < k_end)
        if GROUPS > 0 or FP4:
            s = _factors(
                *(scales, stride, ahead, n, more, num_groups),
                *(SLICES, COUNT, GROUP, ROW_GROUP, FP4),
            )
            if MODE == 2:
                s_up = _factors(
                    *(scales, stride, ahead, up, more, num_groups),
                    *(SLICES, COUNT, GROUP, ROW_GROUP, FP4),
                )
            if ZEROS:
                z = _factors(
                    zeros, zero_stride, ahead, n, more, num_groups, SLICES, COUNT, GROUP, 1, False
                )
                if MODE == 2:
                    z_up = _factors(
                        *(zeros, zero_stride, ahead, up, more, num_groups),
                        *(SLICES, COUNT, GROUP, 1, False),
                    )
        sums = _add_step(
            *(sums, w_source, n_start, k, total_rows, num_words, xt, now, zero),
            *(BLOCK_N, SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, TMA, ASSEMBLY),
        )
        if MODE == 2:
            sums_up = _add_step(
                *(sums_up, w_source, num_outputs + n_start, k, total_rows, num_words),
                *(xt, now_up, zero_up),
                *(BLOCK_N, SLICES, GROUPS, KIND, GROUP, E8M0, ZEROS, TMA, ASSEMBLY),
            )

    y = _diagonal(sums, BLOCK_N)
    u = y
    if MODE == 2:
        u = _diagonal(sums_up, BLOCK_N)
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
    span = triton.cdiv(triton.cdiv(num_inputs, split_k), STEP) * STEP
    if mode == _PARTS:
        out = torch.empty(split_k, 1, num_outputs, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    lines, gains = x.view(-1, WIDTH), gain.view(-1, WIDTH)
    if tma is None:
        tma = has_tma(x) and fits_tma(weight.words, lines, gains)
    sources: tuple[object, ...] = (weight.words, lines, gains)
    if tma:
        sources = (
            TensorDescriptor.from_tensor(weight.words, [choice.block_n, WIDTH]),
            TensorDescriptor.from_tensor(lines, [8, WIDTH]),
            TensorDescriptor.from_tensor(gains, [8, WIDTH]),
        )
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
        span,
        split_k,
        BLOCK_N=choice.block_n,
        SLICES=slices,
        KIND=KINDS[weight.kind],
        GROUP=1 << 30 if whole and not is_fp4 else weight.group,
        ROW_GROUP=weight.row_group,
        GROUPS=0 if whole or is_fp4 else max(slices * WIDTH // weight.group, 1),
        E8M0=weight.scales.dtype == torch.uint8,
        ZEROS=zeros is not None,
        CHANNEL=factors is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        MODE=mode,
        ACTIVATION=int(activation == "gelu_tanh"),
        TMA=tma,
        DTYPE=_TRITON_DTYPES[x.dtype],
        ASSEMBLY=not x.is_cpu,
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        **pdl_options(x),
    )
    return out


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
