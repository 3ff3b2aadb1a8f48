"""Triton version of `kernels.linear.moe.normed_scores`: a norm and the router behind it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from .rotation import load_parts

_TILE = 8192  # weights of a program


@triton.jit(do_not_specialize=["num_rows"])
def _normed_scores_kernel(
    x,  # [M, H], or [PARTS, M, H] float32
    residual,  # [M, H]
    gain,  # [H], weight of the norm
    weight,  # [E, H]
    bias,  # [E]
    normed,  # [M, H]
    stream,  # [M, H]
    scores,  # [M, E] float32
    residual_stride,
    num_rows,  # M
    eps,
    E,
    SIZE: tl.constexpr,  # H
    ROWS: tl.constexpr,  # experts of a program
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = x is whole
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (some experts, token): each norms the token's row again, and the first stores it."""
    dtype: tl.constexpr = normed.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside, there = column < SIZE, expert < E
    own = weight + expert[:, None] * SIZE + column[None, :]
    w = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    g = tl.load(gain + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    value = load_parts(x + token * SIZE + column, inside, num_rows * SIZE, PARTS)
    is_first = tl.program_id(0) == 0
    if ADD:
        other = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(stream + token * SIZE + column, value, mask=inside & is_first)
    v = value.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    if g.dtype != tl.float32:  # a float32 weight is applied before rounding
        v = v.to(dtype).to(tl.float32)
    row = (v * g.to(tl.float32)).to(dtype)
    tl.store(normed + token * SIZE + column, row, mask=inside & is_first)
    score = tl.sum(w.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if BIAS:
        score += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    tl.store(scores + token * E + expert, score, mask=there)


def normed_scores(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.linear.moe.normed_scores`."""
    assert x.is_contiguous() and weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    num_rows, size = x.shape[-2:]
    num_experts, (gain, eps) = weight.shape[0], norm
    normed = torch.empty(num_rows, size, dtype=weight.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(normed)
    scores = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    rows = max(1, min(4, _TILE // block, num_experts // 64))
    rows = triton.next_power_of_2(rows)
    if num_rows:
        _normed_scores_kernel[(triton.cdiv(num_experts, rows), num_rows)](
            x,
            normed if residual is None else residual,
            gain,
            weight,
            weight if bias is None else bias,
            normed,
            stream,
            scores,
            size if residual is None else residual.stride(0),
            num_rows,
            eps,
            num_experts,
            SIZE=size,
            ROWS=rows,
            BLOCK=block,
            PARTS=x.shape[0] if x.dim() == 3 else 0,
            ADD=residual is not None,
            BIAS=bias is not None,
            num_warps=4,
            **pdl_options(x),
        )
    return normed, stream, scores


hash_functions(globals())
