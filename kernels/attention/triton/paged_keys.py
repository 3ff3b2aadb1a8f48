"""What kernels over a paged cache share: arguments of their launches, and a tile of keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ..paged_rows import AttentionRule, PagedRows
from .latent_rows import load_latent, load_rotary
from .online_softmax import absorb, soft_capped

_STRIDES = (
    *("q_stride_t", "q_stride_h", "k_stride_b", "k_stride_t", "k_stride_h"),
    *("v_stride_b", "v_stride_t", "v_stride_h"),
)


def paged_arguments(
    query: Tensor, kv_cache: Tensor, rows: PagedRows, rule: AttentionRule, out: Tensor
) -> dict[str, Any]:
    """Arguments of a kernel by parameter name: its tensors with their strides, sizes and rule.

    query: [T, Hq, D]; out: [T, Hq, Dv]. In place of absent sinks stands the query.
    """
    num_tokens, num_heads, head_dim = query.shape
    keys, values = (kv_cache, kv_cache) if rule.is_mla else (kv_cache[0], kv_cache[1])
    table, dim = rows.block_table, out.shape[-1] if rule.is_mla else head_dim
    assert query.stride(-1) == 1 and keys.stride(-1) == 1 and table.stride(-1) == 1
    strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    return {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "block_table": table,
        "query_start_loc": rows.query_start_loc,
        "seq_lens": rows.seq_lens,
        "sinks": query if rule.sinks is None else rule.sinks,
        "out": out,
        "scale": rule.key_scale,
        "v_scale": None if rule.fp8 is None else rule.fp8.v_scale,
        "softcap": 1.0 if rule.softcap is None else rule.softcap,
        "num_reqs": rows.seq_lens.shape[0],
        "num_tokens": num_tokens,
        **dict(zip(_STRIDES, strides, strict=True)),
        "table_stride": table.stride(0),
        "Q_HEADS": num_heads,
        "GROUP": num_heads // keys.shape[2],
        "DIM": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "PAGE": keys.shape[1],
        "WINDOW": rule.sliding_window or 0,
        "SOFTCAP": rule.softcap is not None,
        "SINKS": rule.sinks is not None,
    }


def latent_arguments(query: Tensor, rule: AttentionRule, out: Tensor) -> dict[str, Any]:
    """Further arguments of kernels that also serve latent attention (MLA), by parameter name."""
    dim_v = out.shape[-1]
    return {
        "DIM_REST": query.shape[-1] - dim_v if rule.is_mla else 0,
        "DIM_V": dim_v,
        "BLOCK_V": triton.next_power_of_2(dim_v),
        "MLA": rule.is_mla,
        "PACKED": rule.is_mla and rule.fp8 is not None,
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
    }


@triton.jit
def absorb_tile(
    state,  # (maxima, totals, sums of values); see `online_softmax.absorb`
    q,  # [BLOCK_M, BLOCK_D]
    q_rest,  # [BLOCK_M, DIM_REST]; unused without one
    position,  # [BLOCK_M] sequence position of each row
    cache,  # pointers to keys and values, and their strides by block, token and head
    table,  # pointer to the request's row of the block table
    kv_head,
    key_start,
    low,  # keys before it are not read; None if no tile has any
    high,  # keys from here on are not read
    scale,
    softcap,
    DIMS: tl.constexpr,  # DIM, DIM_REST, DIM_V, BLOCK_D, BLOCK_V
    FORM: tl.constexpr,  # PAGE, BLOCK_N, WINDOW, SOFTCAP, MLA, PACKED, PRECISION
):
    """Let the rows absorb the BLOCK_N keys from `key_start` on that they see."""
    DIM: tl.constexpr = DIMS[0]
    DIM_REST: tl.constexpr = DIMS[1]
    DIM_V: tl.constexpr = DIMS[2]
    PAGE: tl.constexpr = FORM[0]
    BLOCK_N: tl.constexpr = FORM[1]
    WINDOW: tl.constexpr = FORM[2]
    PACKED: tl.constexpr = FORM[5]
    PRECISION: tl.constexpr = FORM[6]
    dim = tl.arange(0, DIMS[3])
    at = key_start + tl.arange(0, BLOCK_N)  # [BLOCK_N] key position
    exists = at < high
    if low is not None:  # their pages may hold another request's values by now
        exists = exists & (at >= low)
    page = tl.load(table + at // PAGE, mask=exists, other=0).to(tl.int64)
    k_row = cache[0] + page * cache[2] + (at % PAGE) * cache[3] + kv_head * cache[4]
    if PACKED:
        k = load_latent(k_row, exists, q.dtype, DIM, DIMS[3])
    else:
        k_inside = exists[:, None]
        if DIMS[3] != DIM:
            k_inside = k_inside & (dim < DIM)[None, :]
        k = tl.load(k_row[:, None] + dim[None, :], mask=k_inside, other=0.0)
    k = k.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DIM_REST > 0:
        rest = tl.arange(0, DIM_REST)
        if PACKED:
            k_rest = load_rotary(k_row, exists, q.dtype, DIM, DIM_REST)
        else:
            k_rest = tl.load(k_row[:, None] + DIM + rest[None, :], mask=exists[:, None], other=0.0)
        scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision=PRECISION)
    scores *= scale
    if FORM[3]:
        scores = soft_capped(scores, softcap)
    visible = exists[None, :] & (at[None, :] <= position[:, None])
    if WINDOW > 0:
        visible = visible & (at[None, :] > position[:, None] - WINDOW)
    if FORM[4]:
        v = k
    else:
        dim_v = tl.arange(0, DIMS[4])
        v_row = cache[1] + page * cache[5] + (at % PAGE) * cache[6]
        v_row += kv_head * cache[7]
        inside = exists[:, None] & (dim_v < DIM_V)[None, :]
        v = tl.load(v_row[:, None] + dim_v[None, :], mask=inside, other=0.0).to(q.dtype)
    return absorb(scores, visible, v, state[0], state[1], state[2], PRECISION)


hash_functions(globals())
