"""Splits of the keys: the range of each, and their attention combined into that over all keys.

A second kernel combines them, or the last program of the first kernel. Several splits are loaded
at once; one after the other, each would wait for its own loads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs


@triton.jit
def keys_of_split(
    seq_len,
    cached,
    split,
    splits,
    least_keys,
    alone,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Find one split's range of a request's keys: (first key, end, number of splits with work)."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, cached - WINDOW + 1) // PAGE * PAGE
    length = tl.maximum(seq_len - low, 0)
    chunk, active = length, 1
    if (splits > 1) & (length > alone):
        chunk = tl.maximum(tl.cdiv(length, splits), least_keys)
        chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
        active = tl.maximum(tl.cdiv(length, chunk), 1)
    low += split * chunk
    return low, tl.minimum(seq_len, low + chunk), active


@triton.jit
def sum_own_splits(
    partial,  # [splits, T, Hq, D] fp32
    lse,  # [splits, T, Hq] fp32
    out,  # [T, Hq, D]
    start,  # first token row of the request
    query_len,
    kv_head,
    splits,
    split_stride,  # T * Hq
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Combine the splits for the rows of one program, inside the attention kernel."""
    split = tl.arange(0, MAX_SPLITS)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    token = (start + row // GROUP).to(tl.int64)
    flat = token * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    valid = row // GROUP < query_len
    mask = valid[:, None] & (dim < DIM)[None, :]
    # bypass L1: programs on this multiprocessor may have cached these lines before the write
    top = tl.load(
        lse + split[:, None].to(tl.int64) * split_stride + flat[None, :],
        mask=(split < splits)[:, None] & valid[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.max(top, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    most: tl.constexpr = 8192 // (ROWS * BLOCK_D)  # splits at a time that registers have room for
    at_once: tl.constexpr = min(max(most, 1), 8, MAX_SPLITS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, splits, at_once):
        for more in tl.static_range(at_once):
            own = first + more
            at = own.to(tl.int64) * split_stride + flat
            weight = tl.load(
                lse + at, mask=valid & (own < splits), other=float("-inf"), cache_modifier=".cg"
            )
            weight = tl.exp2(weight - top)
            part = tl.load(
                partial + at[:, None] * DIM + dim[None, :],
                mask=mask & (own < splits),
                other=0.0,
                cache_modifier=".cg",
            )
            total += weight
            acc += part * weight[:, None]
    acc *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(out + flat[:, None] * DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _reduce_kernel(
    partial,  # [SPLITS, T, Hq, DIM_V] fp32
    lse,  # [SPLITS, T, Hq] fp32; -inf: no partial; inf in split 0: `out` is final
    query_start_loc,  # [N + 1] int32; None: all rows have partials
    out,  # [T, Hq, DIM_V]
    num_reqs,
    num_tokens,
    Q_HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_V)
    inside = (head < Q_HEADS)[:, None] & (dim < DIM_V)[None, :]
    target = out + (token * Q_HEADS + head)[:, None] * DIM_V + dim[None, :]
    live = token < num_tokens
    if query_start_loc is not None:
        live = token < tl.load(query_start_loc + num_reqs)  # other rows have no partials
    split = tl.arange(0, SPLITS_BLOCK)[:, None]
    flat = (split * num_tokens + token) * Q_HEADS + head[None, :]  # [SPLITS_BLOCK, HEADS]
    exists = (split < SPLITS) & live & (head < Q_HEADS)[None, :]
    weights = tl.load(lse + flat, mask=exists, other=float("-inf"))
    done = tl.max(tl.where((split == 0) & (weights == float("inf")), 1, 0), 0) > 0  # [HEADS]
    is_part = (weights != float("-inf")) & ~done[None, :]
    part = tl.load(  # all of them, so as not to wait for the weights; unused memory may hold NaN
        partial + flat[:, :, None] * DIM_V + dim[None, None, :],
        mask=exists[:, :, None] & (dim < DIM_V)[None, None, :],
        other=0.0,
    )
    part = tl.where(is_part[:, :, None], part, 0.0)
    weights = tl.where(is_part, weights, float("-inf"))
    top = tl.max(weights, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(weights - top[None, :])
    total = tl.sum(weights, 0)
    acc = tl.sum(part * weights[:, :, None], 0)
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside & ~done[:, None])


def sum_splits(
    partial: Tensor, lse: Tensor, query_start_loc: Tensor | None, out: Tensor, num_reqs: int
) -> None:
    """Combine partial [splits, T, Hq, D] and lse [splits, T, Hq] into out [T, Hq, D].

    Rows beyond the requests' last one have no partials, unless `query_start_loc` is None."""
    splits, num_tokens, num_heads, dim_v = partial.shape
    block_v = triton.next_power_of_2(dim_v)
    splits_block = triton.next_power_of_2(splits)
    heads = max(1, min(triton.next_power_of_2(num_heads), 4096 // (splits_block * block_v)))
    _reduce_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        partial,
        lse,
        query_start_loc,
        out,
        num_reqs,
        num_tokens,
        Q_HEADS=num_heads,
        DIM_V=dim_v,
        BLOCK_V=block_v,
        SPLITS=splits,
        SPLITS_BLOCK=splits_block,
        HEADS=heads,
        **pdl_options(out),
    )
