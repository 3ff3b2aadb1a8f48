"""Triton linear layer for one row (batch size 1): weights pass through registers once.

It can be fused with an RMS norm of the input, bias, residual, gated activation, or picking the best
token. The first chunk of weights is loaded before the input is ready.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs
from ..linear_choice import GATE_UP, PARTS, PLAIN, Gemv
from .head_sample import HeadRows, keep_best

_ADD = 1  # the value of MODE for a product to which a residual is added


@triton.jit
def _chunk(
    pointers, start, row_inside, k, K: tl.constexpr, BLOCK_K: tl.constexpr, HINT: tl.constexpr
):
    inside = row_inside
    if K % BLOCK_K != 0:
        inside = row_inside & (start + k < K)[None, :]
    if HINT == 1:
        chunk = tl.load(pointers + start, mask=inside, other=0.0)
    elif HINT == 2:
        chunk = tl.load(pointers + start, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        chunk = tl.load(pointers + start, mask=inside, other=0.0, eviction_policy="evict_first")
    return chunk


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Compute silu(gate) * up, or gelu_tanh(gate) * up if ACTIVATION is 1, in float32."""
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * inner))
    else:
        activated = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate))
    return activated * up


@triton.jit(
    do_not_specialize=["salt"],
    do_not_specialize_on_alignment=["positions"],
)
def _gemv_kernel(
    weight,  # [N, K], contiguous; [2 N, K] if gated: gate rows, then up rows
    x,  # [K]
    gain,  # [K], weight of the norm
    bias,  # [N] or [2 N]
    residual,  # [N]
    out,  # [N]
    seeds,  # [1] int64, as the rest in `head_sample`
    positions,  # [1] int64
    greedy,  # [1] bool
    temperature,  # [1] float32
    best,  # [1, B] float32
    best_token,  # [1, B] int32
    largest,  # [1, B] float32
    salt,
    eps,
    num_outputs,  # N
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    HINT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    n = block * ROWS + tl.arange(0, ROWS)  # [ROWS] output
    k = tl.arange(0, BLOCK_K)
    inside = n < num_outputs
    rows = weight + n[:, None] * K + k[None, :]
    row_inside = inside[:, None]
    chunks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    if STAGES == 0:
        next_w = _chunk(rows, 0, row_inside, k, K, BLOCK_K, HINT)
        next_up = next_w
        if MODE == 2:
            next_up = _chunk(rows + num_outputs * K, 0, row_inside, k, K, BLOCK_K, HINT)
        later_w, later_up = next_w, next_up
        if AHEAD == 2 and chunks > 1:
            later_w = _chunk(rows, BLOCK_K, row_inside, k, K, BLOCK_K, HINT)
            if MODE == 2:
                later_up = _chunk(rows + num_outputs * K, BLOCK_K, row_inside, k, K, BLOCK_K, HINT)
        wait_for_inputs(PDL)
        for index in tl.static_range(chunks):
            w, up = next_w, next_up
            next_w, next_up = later_w, later_up
            if index + AHEAD < chunks:
                ahead = (index + AHEAD) * BLOCK_K
                later_w = _chunk(rows, ahead, row_inside, k, K, BLOCK_K, HINT)
                if MODE == 2:
                    later_up = _chunk(
                        rows + num_outputs * K, ahead, row_inside, k, K, BLOCK_K, HINT
                    )
                if AHEAD == 1:
                    next_w, next_up = later_w, later_up
            at = index * BLOCK_K + k
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                value *= tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * value[None, :]
            if MODE == 2:
                acc_up += up.to(tl.float32) * value[None, :]
    else:
        wait_for_inputs(PDL)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + k
            w = _chunk(rows, start, row_inside, k, K, BLOCK_K, HINT)
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                value *= tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * value[None, :]
            if MODE == 2:
                up = _chunk(rows + num_outputs * K, start, row_inside, k, K, BLOCK_K, HINT)
                acc_up += up.to(tl.float32) * value[None, :]

    y = tl.sum(acc, 1)
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        y *= scale
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if MODE == 1:
        y += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        u = tl.sum(acc_up, 1)
        if NORM:
            u *= scale
        if BIAS:
            u += tl.load(bias + num_outputs + n, mask=inside, other=0.0).to(tl.float32)
        y = gated(y, u, ACTIVATION)
    if MODE == 3:
        rounded = y.to(x.dtype.element_ty).to(tl.float32)  # as the logits would be
        keep_best(
            rounded[:, None],
            n,
            inside[:, None],
            tl.zeros([1], tl.int32),
            tl.full([1], True, tl.int1),
            block,
            tl.num_programs(0),
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
        tl.store(out + n, y.to(out.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor,
    weight: Tensor,
    choice: Gemv,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    head: HeadRows | None = None,
) -> Tensor:
    """See `kernels.linear.linear`, whose operations are the modes; x must be one row, [1, K].

    With a `head`, the kernel also draws tokens, and `head` finishes and holds the result.
    """
    assert mode != PARTS and (residual is None or mode == PLAIN)
    assert x.shape[0] == 1 and x.stride(1) == 1 and weight.is_contiguous()
    num_outputs, num_inputs = weight.shape[0] // (2 if mode == GATE_UP else 1), weight.shape[1]
    out = x
    if head is None:
        out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    grid = (triton.cdiv(num_outputs, choice.rows),)
    sampling = (x,) * 7 + (0,) if head is None else head.arguments(grid[0])
    _gemv_kernel[grid](
        weight,
        x,
        gain,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        *sampling,
        eps,
        num_outputs,
        K=num_inputs,
        ROWS=choice.rows,
        BLOCK_K=choice.block_k,
        STAGES=choice.stages,
        AHEAD=choice.ahead,
        HINT=choice.hint,
        NORM=norm is not None,
        BIAS=bias is not None,
        MODE=mode if residual is None else _ADD,
        ACTIVATION=int(activation == "gelu_tanh"),
        NOISE=head is not None and head.has_noise,
        num_warps=choice.num_warps,
        **pdl_options(x),
    )
    return out
