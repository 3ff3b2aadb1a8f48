"""What kernels over a paged cache share: arguments of their launches, and loops over its keys."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import fetch_early, hash_functions
from ..paged_rows import AttentionRule, PagedRows
from .latent_rows import load_latent, load_rotary
from .online_softmax import LOG2E, absorb, absorb_scaled, soft_capped

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
def pages_of_keys(table, key_start, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of BLOCK_N keys from `key_start` on, [BLOCK_N]; `table` is the request's row."""
    at = key_start + tl.arange(0, BLOCK_N)
    return tl.load(table + at // PAGE, mask=at < high, other=0)


@triton.jit
def absorb_tile(
    state,  # (maxima, totals, sums of values); see `online_softmax.absorb`
    q,  # [BLOCK_M, BLOCK_D]
    q_rest,  # [BLOCK_M, DIM_REST]; unused without one
    position,  # [BLOCK_M] sequence position of each row
    cache,  # pointers to keys and values, and their strides by block, token and head
    page,  # [BLOCK_N] from `pages_of_keys`
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
    page = page.to(tl.int64)
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


@triton.jit
def fetch_first_tile(
    key_cache, value_cache, table, low, high, key, kv_head,
    ROW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Prefetch the keys and values of a split's first tile into L2."""
    at = tl.maximum(tl.minimum(low + key, high - 1), 0)
    page = tl.load(table + at // PAGE).to(tl.int64)
    line = tl.arange(0, (BLOCK_D + 63) // 64) * 64
    line_of = (page * PAGE + at % PAGE) * ROW + kv_head * DIM
    fetch_early(key_cache + line_of[:, None] + line[None, :])
    fetch_early(value_cache + line_of[:, None] + line[None, :])


@triton.jit
def _pages_of_tile(
    table, key_start, high, key, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The pages of a tile's keys: one number if they are in one page, or [BLOCK_N]."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + key_start // PAGE, mask=key_start < high, other=0)
    elif BLOCK_N % PAGE == 0:
        page = tl.load(
            table + key_start // PAGE + key // PAGE, mask=key_start + key < high, other=0
        )
    else:
        at = key_start + key
        page = tl.load(table + at // PAGE, mask=at < high, other=0)
    return page


@triton.jit
def _rows_of_tile(
    pages, key_start, key, ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Where a tile's keys are in the cache, less `key % PAGE` rows: elements, a number or
    [BLOCK_N, 1]."""
    if PAGE % BLOCK_N == 0:
        rows = (pages.to(tl.int64) * PAGE + key_start % PAGE) * ROW
    elif BLOCK_N % PAGE == 0:
        rows = pages.to(tl.int64)[:, None] * (PAGE * ROW)
    else:
        at = key_start + key
        rows = (pages.to(tl.int64) * PAGE + at % PAGE - key % PAGE)[:, None] * ROW
    return rows


@triton.jit
def attend_keys(
    q, key_cache, value_cache, table, low, high, cached, within, key, dim, kv_head,
    scale, softcap, top, total,
    ROW: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention of q [M, D] over the cached keys in [low, high): (result [M, D] float32, running
    maximum [M] in the log2 domain, sum of weights [M]).

    `top` [M] and `total` [M, BLOCK_N] are the running maximum and sums to begin with. With AHEAD
    the pages of a tile are read one tile earlier. The compiler then keeps `num_stages` - 1 tiles of
    keys and values in flight. Without it, it counts the page as a stage of the chain and keeps one
    tile or none."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "tf32"
    in_page = (key % PAGE)[:, None] * ROW + (kv_head * DIM + dim)[None, :]
    key_rows, value_rows = key_cache + in_page, value_cache + in_page
    last = tl.minimum(cached + within, high - 1)  # [BLOCK_M] last key that a row attends to
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if AHEAD:
        next_pages = _pages_of_tile(table, low, high, key, PAGE, BLOCK_N)
    for key_start in range(low, high, BLOCK_N):
        at = key_start + key  # [BLOCK_N] key position
        if AHEAD:
            pages = next_pages
            next_pages = _pages_of_tile(table, key_start + BLOCK_N, high, key, PAGE, BLOCK_N)
        else:
            pages = _pages_of_tile(table, key_start, high, key, PAGE, BLOCK_N)
        rows = _rows_of_tile(pages, key_start, key, ROW, PAGE, BLOCK_N)
        in_cache = (at < high)[:, None]
        if BLOCK_D != DIM:
            in_cache = in_cache & (dim < DIM)[None, :]
        k = tl.load(key_rows + rows, mask=in_cache, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            scores = soft_capped(scores * scale, softcap) * LOG2E
        else:
            scores *= scale * LOG2E
        visible = at[None, :] <= last[:, None]
        if WINDOW > 0:
            visible = visible & (at[None, :] > (cached + within)[:, None] - WINDOW)
        v = tl.load(value_rows + rows, mask=in_cache, other=0.0).to(q.dtype)
        top, total, acc = absorb_scaled(scores, visible, v, top, total, acc, PRECISION)
    sums = tl.sum(total, 1)
    return acc * (1.0 / tl.where(sums == 0.0, 1.0, sums))[:, None], top, sums


hash_functions(globals())
