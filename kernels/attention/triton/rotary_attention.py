"""Triton version of `kernels.attention.rotary_attention`: decode and verify steps in one kernel.

A program works on one request and one key head with its query heads, or on a split of the request's
keys. It first stores those of the step's own keys that belong to its split, then reads all keys of
the split from the cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import fetch_early, hash_functions, pdl_options, wait_for_inputs
from ...linear.rotation import Rotation
from ...linear.triton.rotation import angles, load_parts, pairs, rotated
from ...quant.triton.e4m3 import to_cache
from ..paged_rows import AttentionRule, PagedRows
from .attention_plan import MAX_SPLITS, Launch
from .online_softmax import LEAST, LOG2E, absorb_scaled, soft_capped
from .split_sums import keys_of_split, sum_own_splits, sum_splits

_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


@triton.jit
def _fetch_first_tile(
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
def _store_new_keys(
    new_key, value, positions, cos_sin, slot_mapping, gain, key_cache, value_cache,
    start, query_len, cached, low, high, kv_head, dim, column, turn,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, part_stride, eps, k_scale, v_scale,
    dtype: tl.constexpr, NEW: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Rotate the step's own keys and write those in [low, high), with values, into the cache."""
    partner, pair, is_first = turn
    dim_inside = dim < DIM
    new = tl.arange(0, NEW)
    token = start + tl.minimum(new, query_len - 1)
    cos, sin = angles(cos_sin, tl.load(positions + token), dim, pair, is_first, ROT, BLOCK_D)
    token = token.to(tl.int64)
    rows = new_key + token * k_stride_t + kv_head * k_stride_h
    inside = dim_inside[None, :]
    k = rotated(rows, inside, gain, cos, sin, dim, partner, part_stride, eps, DIM, NORM, PARTS)
    rows = value + token * v_stride_t + kv_head * v_stride_h
    v = load_parts(rows[:, None] + dim[None, :], inside, part_stride, PARTS)
    slot = tl.load(slot_mapping + token)
    target = slot[:, None] * ROW + column[None, :]
    at = cached + new
    writes = (new < query_len) & (at >= low) & (at < high) & (slot >= 0)
    writes = writes[:, None] & dim_inside[None, :]
    tl.store(key_cache + target, to_cache(k, k_scale, dtype), mask=writes)
    tl.store(value_cache + target, to_cache(v, v_scale, dtype), mask=writes)
    tl.debug_barrier()


@triton.jit
def _attend(
    q, key_cache, value_cache, table, pages, in_page, low, high, cached, within, key, dim_inside,
    scale, softcap, top, total,
    ROW: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of q [M, D] over the cached keys in [low, high): (result [M, D] float32, running
    maximum [M] in the log2 domain, sum of weights [M]).

    `top` [M] and `total` [M, BLOCK_N] are the running maximum and sums to begin with."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    BLOCK_N: tl.constexpr = key.shape[0]
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "tf32"
    key_rows, value_rows = key_cache + in_page, value_cache + in_page
    last = tl.minimum(cached + within, high - 1)  # [BLOCK_M] last key that a row attends to
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key_start in range(low, high, BLOCK_N):
        at = key_start + key  # [BLOCK_N] key position
        present = at < high
        if BLOCK_N % PAGE == 0:
            page = tl.load(pages + key_start // PAGE, mask=present, other=0).to(tl.int64)
            offset = page[:, None] * (PAGE * ROW)
        else:
            page = tl.load(table + at // PAGE, mask=present, other=0).to(tl.int64)
            offset = (page * PAGE + at % PAGE - key % PAGE)[:, None] * ROW
        in_cache = present[:, None]
        if BLOCK_D != DIM:
            in_cache = in_cache & dim_inside[None, :]
        k = tl.load(key_rows + offset, mask=in_cache, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            scores = soft_capped(scores * scale, softcap) * LOG2E
        else:
            scores *= scale * LOG2E
        visible = at[None, :] <= last[:, None]
        if WINDOW > 0:
            visible = visible & (at[None, :] > (cached + within)[:, None] - WINDOW)
        v = tl.load(value_rows + offset, mask=in_cache, other=0.0).to(q.dtype)
        top, total, acc = absorb_scaled(scores, visible, v, top, total, acc, PRECISION)
    sums = tl.sum(total, 1)
    return acc * (1.0 / tl.where(sums == 0.0, 1.0, sums))[:, None], top, sums


# `splits` is not a constexpr: together with the number of parts it would make too many kinds.
@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "splits", "least_keys", "alone", "max_query_len"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "query_start_loc"],
)
def _rotary_attention_kernel(
    query,  # [T, Hq, D]; PARTS: [PARTS, T, Hq, D] float32, as key and value
    new_key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    positions,  # [T] int64
    cos_sin,  # [max_position, ROT]
    slot_mapping,  # [T] int64
    query_gain,  # [D]
    key_gain,  # [D]
    key_cache,  # [num_blocks, PAGE, Hkv, D], contiguous
    value_cache,  # [num_blocks, PAGE, Hkv, D]
    block_table,  # [N, max_blocks] int32
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, D], contiguous
    partial,  # [splits, T, Hq, D] fp32
    lse,  # [splits, T, Hq] fp32, log2 of the softmax denominator; inf in split 0: `out` is final
    arrivals,  # [N, Hkv] int32, zeros before and after
    scale,
    k_scale,  # of stored keys, which `scale` contains, too; None unless the cache is e4m3
    v_scale,
    softcap,
    eps,
    num_reqs,
    num_tokens,
    splits,  # a split has work if it begins within the keys; the first always has
    least_keys,  # of a split, except the last with work
    alone,  # up to this number of keys one split does all the work
    max_query_len,  # requests with more new tokens are skipped
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    part_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head, all of one program
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query rows: tokens times GROUP
    ROWS: tl.constexpr,  # the rows of BLOCK_M that are used
    BLOCK_N: tl.constexpr,
    NEW: tl.constexpr,  # rows for the step's own keys
    WINDOW: tl.constexpr,  # 0 = none
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    LAST_SUMS: tl.constexpr,  # rows whose splits the last program sums; 0 = another kernel does
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    request, kv_head, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if HEADS_FIRST:
        request, kv_head, stride = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    split = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    within = row // GROUP  # [BLOCK_M] query token within the request
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    dim_inside = dim < DIM
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    row_size: tl.constexpr = KV_HEADS * DIM

    # Read before the previous kernel has ended, since that kernel does not write these.
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    covered = tl.load(query_start_loc + num_reqs)
    seq_len = tl.load(seq_lens + request)
    cached = seq_len - query_len  # keys before the step's own
    low, high, active = keys_of_split(
        seq_len, cached, split, splits, least_keys, alone, PAGE, BLOCK_N, WINDOW
    )
    key = tl.arange(0, BLOCK_N)  # within a tile
    table = block_table + request.to(tl.int64) * table_stride
    pages = table + key // PAGE
    column = kv_head * DIM + dim
    in_page = (key % PAGE)[:, None] * row_size + column[None, :]
    if EARLY:
        _fetch_first_tile(
            key_cache, value_cache, table, low, high, key, kv_head, row_size, DIM, BLOCK_D, PAGE
        )
    turn = pairs(dim, ROT, INTERLEAVED)
    partner, pair, is_first = turn
    valid = within < query_len
    token = (start + within).to(tl.int64)
    q_row = tl.arange(0, ROWS)
    # rows without a token repeat one that exists, so that no mask is needed
    q_token = start + tl.minimum(q_row // GROUP, tl.maximum(query_len - 1, 0))
    q_token = tl.minimum(q_token, num_tokens - 1)
    cos, sin = angles(cos_sin, tl.load(positions + q_token), dim, pair, is_first, ROT, BLOCK_D)
    wait_for_inputs(PDL)

    if split == 0:  # the programs share the work of zeroing token rows without a request
        for empty in range(covered + request, num_tokens, stride):
            target = (head.to(tl.int64) + empty * Q_HEADS)[:, None] * DIM + dim[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], dtype)
            tl.store(out + target, zeros, mask=(row < GROUP)[:, None] & dim_inside[None, :])
    if (query_len <= 0) | (query_len > max_query_len):
        return
    if split >= active:
        if LAST_SUMS == 0:
            if active > 1:
                flat = (split.to(tl.int64) * num_tokens + token) * Q_HEADS + head
                nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
                tl.store(lse + flat, nothing, mask=valid)
        return

    rows = (
        query + q_token.to(tl.int64) * q_stride_t + (kv_head * GROUP + q_row % GROUP) * q_stride_h
    )
    q = rotated(
        rows, dim_inside[None, :], query_gain, cos, sin, dim, partner, part_stride, eps,
        DIM, NORM, PARTS,
    ).to(dtype)  # fmt: skip
    if ROWS < BLOCK_M:
        q = tl.broadcast_to(q[None, :, :], [BLOCK_M // ROWS, ROWS, BLOCK_D])
        q = tl.reshape(q, [BLOCK_M, BLOCK_D])
    if high > cached:  # the split has new keys: it stores them first, then reads all keys alike
        _store_new_keys(
            new_key, value, positions, cos_sin, slot_mapping, key_gain, key_cache, value_cache,
            start, query_len, cached, low, high, kv_head, dim, column, turn,
            k_stride_t, k_stride_h, v_stride_t, v_stride_h, part_stride, eps, k_scale, v_scale,
            dtype, NEW, row_size, DIM, BLOCK_D, ROT, NORM, PARTS,
        )  # fmt: skip
    top = tl.full([BLOCK_M], LEAST, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SINKS:
        if split == 0:  # the sink counts once, as a key without a value
            top = tl.load(sinks + head).to(tl.float32) * LOG2E
            total += tl.where(key == 0, 1.0, 0.0)[None, :]
    result, top, sums = _attend(
        q, key_cache, value_cache, table, pages, in_page, low, high, cached, within, key,
        dim_inside, scale, softcap, top, total, row_size, DIM, PAGE, WINDOW, SOFTCAP,
    )  # fmt: skip
    if v_scale is not None:
        result *= v_scale
    mask = valid[:, None] & dim_inside[None, :]
    flat = token * Q_HEADS + head
    place = flat[:, None] * DIM + dim[None, :]
    if active == 1:
        tl.store(out + place, result.to(dtype), mask=mask)
        if LAST_SUMS == 0:
            if splits > 1:  # tell the second kernel that there is nothing to sum
                done = tl.full([BLOCK_M], float("inf"), tl.float32)
                tl.store(lse + flat, done, mask=valid)
    else:
        own = split.to(tl.int64) * num_tokens * Q_HEADS
        tl.store(partial + own * DIM + place, result, mask=mask)
        flat += own
        tl.store(lse + flat, top + tl.log2(sums), mask=valid)
        if LAST_SUMS > 0:
            tl.debug_barrier()
            counter = arrivals + request * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                tl.debug_barrier()
                sum_own_splits(
                    partial, lse, out, start, query_len, kv_head, active, num_tokens * Q_HEADS,
                    KV_HEADS, GROUP, DIM, BLOCK_D, LAST_SUMS, _MAX_SPLITS,
                )  # fmt: skip
                tl.store(counter, 0)


def rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    plan: Launch,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.attention.rotary_attention.rotary_attention`; `plan.fused` must hold."""
    num_reqs, (_, _, page, kv_heads, _) = rows.seq_lens.shape[0], kv_cache.shape
    assert rows.arrivals is not None and rows.arrivals.numel() >= num_reqs * kv_heads
    parts = query.shape[0] if query.dim() == 4 else 0
    part_stride = query.stride(0) if parts else 0
    if parts:
        assert key.stride(0) == value.stride(0) == part_stride
        query, key, value = query[0], key[0], value[0]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert kv_cache.is_contiguous() and rotation.cos_sin_cache.is_contiguous()
    assert rows.block_table.stride(-1) == 1
    num_tokens, num_heads, dim = query.shape
    shape, splits = (num_tokens, num_heads, dim), plan.splits
    if out is None:
        out = torch.empty(shape, dtype=rule.dtype_of(kv_cache), device=query.device)
    if num_tokens == 0 or num_reqs == 0:
        return out.zero_()
    partial = lse = torch.empty(1, dtype=torch.float32, device=query.device)
    if splits > 1:
        partial = torch.empty(splits, *shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, *shape[:2], dtype=torch.float32, device=query.device)
    norms, group = rotation.norms, num_heads // kv_heads
    grid = (kv_heads, num_reqs) if plan.heads_first else (num_reqs, kv_heads)
    options = pdl_options(query)
    _rotary_attention_kernel[(*grid, splits)](
        query,
        key,
        value,
        rotation.positions,
        rotation.cos_sin_cache,
        rows.slot_mapping,
        *((query, query) if norms is None else norms[:2]),
        kv_cache[0],
        kv_cache[1],
        rows.block_table,
        rows.query_start_loc,
        rows.seq_lens,
        query if rule.sinks is None else rule.sinks,
        out,
        partial,
        lse,
        rows.arrivals,
        rule.key_scale,
        None if rule.fp8 is None else rule.fp8.k_scale,
        None if rule.fp8 is None else rule.fp8.v_scale,
        1.0 if rule.softcap is None else rule.softcap,
        0.0 if norms is None else norms[2],
        num_reqs,
        num_tokens,
        splits,
        plan.least_keys,
        plan.alone,
        rows.max_query_len,
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        part_stride,
        rows.block_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        ROT=rotation.cos_sin_cache.shape[1],
        PAGE=page,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        ROWS=plan.rows,
        NEW=triton.next_power_of_2(max(1, plan.block_m // group)),
        WINDOW=rule.sliding_window or 0,
        INTERLEAVED=rotation.interleaved,
        NORM=norms is not None,
        PARTS=parts,
        SOFTCAP=rule.softcap is not None,
        SINKS=rule.sinks is not None,
        HEADS_FIRST=plan.heads_first,
        EARLY=plan.early and options["PDL"],
        LAST_SUMS=plan.last_sums,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        maxnreg=plan.registers,
        **options,
    )
    if splits > 1 and not plan.last_sums:
        sum_splits(partial, lse, rows.query_start_loc, out, num_reqs)
    return out


hash_functions(globals())
