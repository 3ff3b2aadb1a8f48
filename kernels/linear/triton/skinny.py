"""Triton linear layer for few rows: out = x Wᵀ, with the weights as the left operand of wgmma.

A tile of 64 or 128 weight rows is multiplied with all rows of x at once, so that weights and not
padding fill the smallest shape of the tensor cores. Tiles are loaded through TMA descriptors on
Hopper, and by ordinary loads elsewhere. If K is split, the parts are float32, and the next kernel
sums them in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fetch_early, fits_tma, has_tma, pdl_options, wait_for_inputs
from ..linear_choice import GATE_UP, PARTS, PLAIN, Fixed, Skinny
from .gemv import gated
from .head_sample import HeadRows, keep_best


@triton.jit
def _tile(
    source,
    row,
    k,
    num_rows,
    num_inputs,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load the tile [ROWS, BLOCK_K] of a matrix, with zeros beyond its end."""
    if TMA:
        tile = source.load([row, k])
    else:
        r = row + tl.arange(0, ROWS)
        c = k + tl.arange(0, BLOCK_K)
        inside = (r < num_rows)[:, None] & (c < num_inputs)[None, :]
        tile = tl.load(source + r[:, None] * num_inputs + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit(
    do_not_specialize=["salt", "num_rows"],
    do_not_specialize_on_alignment=["positions"],
)
def _skinny_kernel(
    w_source,  # descriptor of, or pointer to, the weights [N, K]; gated: [2 N, K]
    x_source,  # descriptor of, or pointer to, x [M, K]
    weight,  # pointer to the weights
    gain,  # [K], weight of the norm
    bias,  # [N] or [2 N]
    out,  # [M, N], or [SPLIT_K, M, N] float32
    seeds,  # as the rest in `head_sample`
    positions,
    greedy,
    temperature,
    best,
    best_token,
    largest,
    salt,
    eps,
    num_rows,  # M
    num_outputs,  # N
    num_inputs,  # K
    span,  # columns of one part, a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NOISE: tl.constexpr,
    TMA: tl.constexpr,
    EARLY: tl.constexpr,  # columns prefetched before the input is ready
    DTYPE: tl.constexpr,  # of the model
    PDL: tl.constexpr,
):
    block = tl.program_id(1) // SPLIT_K  # consecutive programs read the same weights
    part = tl.program_id(1) % SPLIT_K
    n_start = block * BLOCK_N
    m_start = tl.program_id(0) * BLOCK_M
    k_start = part * span
    n = n_start + tl.arange(0, BLOCK_N)
    m = m_start + tl.arange(0, BLOCK_M)
    total_rows = num_outputs
    if MODE == 2:
        total_rows = 2 * num_outputs
    if EARLY >= 64:
        line = tl.arange(0, EARLY // 64) * 64
        at = tl.minimum(n, num_outputs - 1)[:, None] * num_inputs + (k_start + line)[None, :]
        at = tl.minimum(at, num_outputs * num_inputs - 1)
        fetch_early(weight + at)
        if MODE == 2:
            fetch_early(weight + num_outputs * num_inputs + at)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for k in range(k_start, tl.minimum(k_start + span, num_inputs), BLOCK_K):
        w = _tile(w_source, n_start, k, total_rows, num_inputs, BLOCK_N, BLOCK_K, TMA)
        x = _tile(x_source, m_start, k, num_rows, num_inputs, BLOCK_M, BLOCK_K, TMA and not NORM)
        if NORM:
            column = k + tl.arange(0, BLOCK_K)
            wide = x.to(tl.float32)
            squares += wide * wide
            g = tl.load(gain + column, mask=column < num_inputs, other=0.0).to(tl.float32)
            x = (wide * g[None, :]).to(DTYPE)
        acc = tl.dot(w, x.T, acc)
        if MODE == 2:
            up = _tile(
                w_source, num_outputs + n_start, k, total_rows, num_inputs, BLOCK_N, BLOCK_K, TMA
            )
            acc_up = tl.dot(up, x.T, acc_up)

    inside = (n < num_outputs)[:, None] & (m < num_rows)[None, :]
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares, 1) / num_inputs + eps)
        acc *= scale[None, :]
        acc_up *= scale[None, :]
    if BIAS:
        if part == 0:
            acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
            if MODE == 2:
                b = tl.load(bias + num_outputs + n, mask=n < num_outputs, other=0.0)
                acc_up += b.to(tl.float32)[:, None]
    if MODE == 1:
        tl.store(out + (part * num_rows + m)[None, :] * num_outputs + n[:, None], acc, mask=inside)
    elif MODE == 3:
        keep_best(
            acc.to(DTYPE).to(tl.float32),
            n,
            inside,
            m,
            m < num_rows,
            block,
            tl.num_programs(1),
            seeds,
            positions,
            greedy,
            temperature,
            best,
            best_token,
            largest,
            salt,
            NOISE,
        )
    else:
        if MODE == 2:
            acc = gated(acc, acc_up, ACTIVATION)
        tl.store(out + m[None, :] * num_outputs + n[:, None], acc.to(DTYPE), mask=inside)


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def multiply(
    x: Tensor,
    weight: Tensor,
    choice: Skinny,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: tuple[Tensor, float] | None = None,
    head: HeadRows | None = None,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.linear.linear`, whose operations are the modes.

    With a `head`, the kernel also draws tokens, and `head` finishes and holds the result. `tma`
    overrides whether descriptors load the tiles.
    """
    assert norm is None or choice.split_k == 1 or mode != PARTS
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    split_k = choice.split_k if mode == PARTS else 1
    span = triton.cdiv(triton.cdiv(num_inputs, split_k), choice.block_k) * choice.block_k
    if head is not None:
        out = x
    elif mode == PARTS:
        shape = (split_k, num_rows, num_outputs)
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if tma is None:
        tma = has_tma(x) and fits_tma(x, weight)
    w_source, x_source = weight, x
    if tma:
        w_source = TensorDescriptor.from_tensor(weight, [choice.block_n, choice.block_k])
        if norm is None:
            x_source = TensorDescriptor.from_tensor(x, [choice.block_m, choice.block_k])
    options = pdl_options(x)
    early = choice.early if options["PDL"] else 0
    while early > span:
        early //= 2
    blocks = triton.cdiv(num_outputs, choice.block_n)
    sampling = (x,) * 7 + (0,) if head is None else head.arguments(blocks)
    gain, eps = (x, 0.0) if norm is None else norm
    _skinny_kernel[(triton.cdiv(num_rows, choice.block_m), blocks * split_k)](
        w_source,
        x_source,
        weight,
        gain,
        x if bias is None else bias,
        out,
        *sampling,
        eps,
        num_rows,
        num_outputs,
        num_inputs,
        span,
        BLOCK_N=choice.block_n,
        BLOCK_M=choice.block_m,
        BLOCK_K=choice.block_k,
        SPLIT_K=split_k,
        NORM=norm is not None,
        BIAS=bias is not None,
        MODE=mode,
        ACTIVATION=int(activation == "gelu_tanh"),
        NOISE=head is not None and head.has_noise,
        TMA=tma,
        EARLY=early,
        DTYPE=_TRITON_DTYPES[x.dtype],
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        enable_fp_fusion=not isinstance(choice, Fixed),  # or tiles might fuse differently
        **options,
    )
    return out
