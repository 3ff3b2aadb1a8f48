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

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...linear.rotation import Rotation
from ...linear.triton.rotation import angles, load_parts, pairs, rotated
from ...quant.triton.e4m3 import to_cache
from ..paged_rows import AttentionRule, PagedRows
from .attention_plan import MAX_SPLITS, Launch
from .online_softmax import LEAST, LOG2E
from .paged_keys import attend_keys, fetch_first_tile
from .split_sums import (
    find_unit,
    keys_of_split,
    keys_of_unit,
    second_unit,
    sum_own_splits,
    sum_splits,
    unit_rows,
)

_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


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


# `splits` is not a constexpr: together with the number of parts it would make too many kinds.
@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "splits", "least_keys", "alone", "unit_bits"]
    + ["max_query_len"],
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
    partial,  # [splits, T, Hq, D] fp32; UNITS: [N + splits, Hkv, LAST_SUMS, D]
    lse,  # without D, log2 of the softmax denominator; inf in split 0: `out` is final
    arrivals,  # [N, Hkv] int32, zeros before and after
    scale,
    k_scale,  # of stored keys, which `scale` contains, too; None unless the cache is e4m3
    v_scale,
    softcap,
    eps,
    num_reqs,
    num_tokens,
    splits,  # a split has work if it begins within the keys; the first always has. UNITS: programs
    # of a key head beyond the first N
    least_keys,  # of a split, except the last with work
    alone,  # up to this number of keys one split does all the work
    unit_bits,  # UNITS: see `find_unit`
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
    AHEAD: tl.constexpr,
    UNITS: tl.constexpr,  # at least N if programs find their splits; 0 = each has its own
    LAST_SUMS: tl.constexpr,  # rows whose splits the last program sums; 0 = another kernel does
    SUM_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    request, kv_head, stride = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if HEADS_FIRST:
        request, kv_head, stride = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    split = tl.program_id(2)
    # UNITS: the keys that a window leaves, with a page and the step's own
    SPAN: tl.constexpr = WINDOW + PAGE + NEW if WINDOW > 0 else 0
    second = 0
    if UNITS > 0:
        stride = num_reqs
        request, split, second, unit_bits = find_unit(
            seq_lens, num_reqs, request, splits, unit_bits, SPAN, UNITS
        )
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
    if UNITS > 0:
        low, high, active = keys_of_unit(
            seq_len, cached, split, unit_bits, SPAN, PAGE, BLOCK_N, WINDOW
        )
    else:
        low, high, active = keys_of_split(
            seq_len, cached, split, splits, least_keys, alone, PAGE, BLOCK_N, WINDOW
        )
    key = tl.arange(0, BLOCK_N)  # within a tile
    table = block_table + request.to(tl.int64) * table_stride
    column = kv_head * DIM + dim
    if EARLY:
        fetch_first_tile(
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
    result, top, sums = attend_keys(
        q, key_cache, value_cache, table, low, high, cached, within, key, dim, kv_head,
        scale, softcap, top, total, row_size, DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, AHEAD,
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
        if UNITS > 0:
            flat = row.to(tl.int64)
            unit = tl.where(split == 0, request, num_reqs + second + split - 1)
            own = unit_rows(unit, kv_head, KV_HEADS, LAST_SUMS)
        flat += own
        tl.store(partial + flat[:, None] * DIM + dim[None, :], result, mask=mask)
        tl.store(lse + flat, top + tl.log2(sums), mask=valid)
        if LAST_SUMS > 0:
            tl.debug_barrier()
            counter = arrivals + request * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                tl.debug_barrier()
                first_row, step = tl.zeros([], tl.int64), (num_tokens * Q_HEADS).to(tl.int64)
                second_row = step
                if UNITS > 0:
                    if split == 0:
                        second = second_unit(
                            seq_lens, num_reqs, splits, unit_bits, request, SPAN, UNITS
                        )
                    first_row = unit_rows(request, kv_head, KV_HEADS, LAST_SUMS)
                    second_row = unit_rows(num_reqs + second, kv_head, KV_HEADS, LAST_SUMS)
                    step = tl.full([], KV_HEADS * LAST_SUMS, tl.int64)
                sum_own_splits(
                    partial, lse, out, start, query_len, kv_head, active, first_row, second_row,
                    step, KV_HEADS, GROUP, DIM, BLOCK_D, LAST_SUMS, _MAX_SPLITS, SUM_VALUES,
                    UNITS > 0,
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
    programs, own = (num_reqs, splits), (splits, *shape[:2])  # of a key head; rows of partial sums
    if plan.extras:
        splits = max(1, int(plan.extras * num_reqs))
        programs, own = (num_reqs + splits, 1), (num_reqs + splits, kv_heads, plan.last_sums)
    partial = lse = torch.empty(1, dtype=torch.float32, device=query.device)
    if splits > 1 or plan.extras:
        partial = torch.empty(*own, dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(own, dtype=torch.float32, device=query.device)
    norms, group = rotation.norms, num_heads // kv_heads
    grid = (kv_heads, programs[0]) if plan.heads_first else (programs[0], kv_heads)
    options = pdl_options(query)
    _rotary_attention_kernel[(*grid, programs[1])](
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
        plan.unit_bits,
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
        AHEAD=plan.ahead,
        UNITS=max(256, triton.next_power_of_2(num_reqs)) if plan.extras else 0,
        LAST_SUMS=plan.last_sums,
        SUM_VALUES=2048 * plan.num_warps,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        maxnreg=plan.registers,
        **options,
    )
    if splits > 1 and not plan.last_sums:
        sum_splits(partial, lse, rows.query_start_loc, out, num_reqs)
    return out


hash_functions(globals())
