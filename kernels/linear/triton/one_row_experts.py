"""Triton experts for a single row, as in decode: each weight passes through registers once.

The first kernel computes the inner values of every chosen expert, the second sums the experts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..experts import ACTIVATIONS, ExpertWeights, PackedExperts

_ROWS = 4  # weight rows of a program
_BLOCK_K = 1024


@triton.jit
def activated(
    gate,
    up,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # index in `moe.ACTIVATIONS`
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The activation of an expert in float32, rounded to DTYPE where the reference rounds."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if ACTIVATION == 2:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        if ACTIVATION == 3:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        gate = gate / (1.0 + tl.exp(-gate))
    return (gate.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def _gate_up_kernel(
    x,  # [K]
    ids,  # [k] int32
    weight,  # [E, 2 N, K]
    bias,  # [E, 2 N]
    out,  # [k, N]
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first product of one row: program (tile of N, choice)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    wait_for_inputs(PDL)
    expert = tl.load(ids + tl.program_id(1)).to(tl.int64)
    rows = weight + expert * 2 * N * K + n[:, None] * K + k[None, :]
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    acc_up = acc
    for start in tl.static_range(0, K, BLOCK_K):
        there = inside[:, None] & (start + k < K)[None, :]
        w = tl.load(rows + start, mask=there, other=0.0, eviction_policy="evict_first")
        up = tl.load(rows + N * K + start, mask=there, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * value
        acc_up += up.to(tl.float32) * value
    gate, up_sum = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if BIAS:
        of_expert = bias + expert * 2 * N + n
        gate += tl.load(of_expert, mask=inside, other=0.0).to(tl.float32)
        up_sum += tl.load(of_expert + N, mask=inside, other=0.0).to(tl.float32)
    result = activated(gate, up_sum, out.dtype.element_ty, ACTIVATION, ALPHA, LIMIT)
    tl.store(out + tl.program_id(1) * N + n, result, mask=inside)


@triton.jit
def _down_kernel(
    inner,  # [TOP_K, K]
    ids,  # [TOP_K] int32
    pair_weights,  # [TOP_K] float32
    weight,  # [E, N, K]
    bias,  # [E, N]
    residual,  # [N]
    out,  # [N]
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The second product of one row, summed over its experts: a program per tile of N."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    wait_for_inputs(PDL)
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    biases = tl.zeros([ROWS], tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids + choice).to(tl.int64)
        share = tl.load(pair_weights + choice)
        rows = weight + expert * N * K + n[:, None] * K + k[None, :]
        for start in tl.static_range(0, K, BLOCK_K):
            there = inside[:, None] & (start + k < K)[None, :]
            w = tl.load(rows + start, mask=there, other=0.0, eviction_policy="evict_first")
            value = tl.load(inner + choice * K + start + k, mask=start + k < K, other=0.0)
            acc += w.to(tl.float32) * (value.to(tl.float32) * share)[None, :]
        if BIAS:
            own = tl.load(bias + expert * N + n, mask=inside, other=0.0)
            biases += own.to(tl.float32) * share
    total = tl.sum(acc, 1) + biases
    if ADD:
        total += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)


def activation_options(experts: ExpertWeights | PackedExperts) -> dict[str, float]:
    """The arguments of `activated` that a kernel bakes."""
    return {
        "ACTIVATION": ACTIVATIONS.index(experts.activation),
        "ALPHA": experts.alpha,
        "LIMIT": experts.limit,
    }


def run_one_row(
    x: Tensor,
    experts: ExpertWeights,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.linear.moe.run_experts`, for x [1, H]; adds `residual` if given."""
    hidden, top_k, inner_size = x.shape[1], ids.shape[1], experts.down.shape[2]
    inner = torch.empty(top_k, inner_size, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    options = pdl_options(x)
    bias = experts.gate_up_bias
    _gate_up_kernel[(triton.cdiv(inner_size, _ROWS), top_k)](
        x, ids, experts.gate_up, x if bias is None else bias, inner, inner_size,
        K=hidden, ROWS=_ROWS, BLOCK_K=_block_k(hidden), BIAS=bias is not None,
        **activation_options(experts), num_warps=4, **options,
    )  # fmt: skip
    bias = experts.down_bias
    _down_kernel[(triton.cdiv(hidden, _ROWS),)](
        inner, ids, weights, experts.down, x if bias is None else bias,
        x if residual is None else residual, out, hidden,
        K=inner_size, TOP_K=top_k, ROWS=_ROWS, BLOCK_K=_block_k(inner_size),
        BIAS=bias is not None, ADD=residual is not None, num_warps=4, **options,
    )  # fmt: skip
    return out


def _block_k(size: int) -> int:
    return int(min(_BLOCK_K, triton.next_power_of_2(size)))


hash_functions(globals())
