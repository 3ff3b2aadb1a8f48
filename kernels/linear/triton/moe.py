"""Triton version of `kernels.linear.moe.run_experts`: two matrix products grouped by expert.

The number of row blocks is an upper bound computed from shapes; surplus blocks find no expert and
end at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ..experts import ACTIVATIONS, ExpertWeights


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
        gate = gate / (1.0 + tl.exp(-gate))
    return (gate.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def _expert_of(block_ends, num_experts, block):
    """Find the expert that owns a row block; num_experts if none does."""
    low, high = 0, num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(block_ends + middle) <= block:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _expert_kernel(
    x,  # GATED: [T, K] tokens; else [T * k, K] in sorted order
    weight,  # [E, N or 2 N, K]
    bias,  # [E, N or 2 N]
    out,  # GATED: [T * k, N] in sorted order; else [T * k, N] by (token, choice)
    order,  # [T * k] int64, sorted index -> (token, choice)
    counts,  # [E] pairs of each expert
    pair_ends,  # [E] their cumulative sum
    block_ends,  # [E] cumulative number of row blocks
    pair_weights,  # [T * k] fp32
    num_experts,
    top_k,
    stride_x,
    N,
    K,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    expert = _expert_of(block_ends, num_experts, block)
    if expert >= num_experts:
        return
    count = tl.load(counts + expert)
    blocks = tl.cdiv(count, BLOCK_M)
    within = (block - (tl.load(block_ends + expert) - blocks)) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = within < count
    place = tl.load(pair_ends + expert) - count + within  # [BLOCK_M] index in sorted order
    pair = tl.load(order + place, mask=valid, other=0)  # [BLOCK_M] (token, choice)
    if GATED:
        source = x + (pair // top_k) * stride_x
    else:
        source = x + place.to(tl.int64) * stride_x
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = (column < N)[:, None]
    rows: tl.constexpr = 2 if GATED else 1
    base = weight + expert.to(tl.int64) * rows * N * K + column.to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        in_k = (start + k < K)[None, :]
        tile = tl.load(source[:, None] + start + k[None, :], mask=valid[:, None] & in_k, other=0.0)
        w = tl.load(base + start + k[None, :], mask=in_columns & in_k, other=0.0)
        acc = tl.dot(tile, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            up = base + N.to(tl.int64) * K + start + k[None, :]
            w = tl.load(up, mask=in_columns & in_k, other=0.0)
            acc_up = tl.dot(tile, tl.trans(w), acc_up, input_precision=PRECISION)
    inside = valid[:, None] & (column < N)[None, :]
    if BIAS:
        of_expert = bias + expert * rows * N + column
        acc += tl.load(of_expert, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(of_expert + N, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = activated(acc, acc_up, x.dtype.element_ty, ACTIVATION, ALPHA, LIMIT)
        target = out + place.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(target, result, mask=inside)
    else:
        share = tl.load(pair_weights + pair, mask=valid, other=0.0)
        target = out + pair[:, None] * N + column[None, :]
        tl.store(target, acc * share[:, None], mask=inside)


def run_experts(x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor) -> Tensor:
    """See `kernels.linear.moe.run_experts`."""
    num_tokens, hidden = x.shape
    gate_up, down = experts.gate_up, experts.down
    num_experts, top_k, inner = down.shape[0], ids.shape[1], down.shape[2]
    pairs = num_tokens * top_k
    if pairs == 0:
        return torch.zeros_like(x)
    assert x.stride(1) == 1 and gate_up.is_contiguous() and down.is_contiguous()
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    per_expert = pairs / num_experts
    block_m = 16 if per_expert <= 16 else 32 if per_expert <= 32 else 64
    block_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    num_blocks = triton.cdiv(pairs, block_m) + min(num_experts, pairs)
    between = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    index = (order, counts, counts.cumsum(0), block_ends, weights.reshape(-1).contiguous())
    options = {
        "ACTIVATION": ACTIVATIONS.index(experts.activation),
        "ALPHA": experts.alpha,
        "LIMIT": experts.limit,
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
        "BLOCK_K": 64,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
        "num_stages": 3,
    }
    first, last = experts.gate_up_bias, experts.down_bias
    _expert_kernel[(num_blocks, triton.cdiv(inner, 64))](
        x, gate_up, x if first is None else first, between, *index, num_experts, top_k,
        x.stride(0), inner, hidden, GATED=True, BIAS=first is not None, **options,
    )  # fmt: skip
    _expert_kernel[(num_blocks, triton.cdiv(hidden, 64))](
        between, down, x if last is None else last, parts, *index, num_experts, top_k,
        inner, hidden, inner, GATED=False, BIAS=last is not None, **options,
    )  # fmt: skip
    return parts.view(num_tokens, top_k, hidden).sum(1).to(x.dtype)


hash_functions(globals())
