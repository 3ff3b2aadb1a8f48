"""Triton version of `kernels.rotary_attention`: for decode and verify steps, in one kernel.

A program takes a request and a key head with its query heads. It reads the cached keys, while those
of the step itself come straight from the projection: nobody waits for them to be stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_plan import FUSED_QUERY_LEN, MAX_SPLITS, Launch
from .launch import fetch_early, pdl_options, wait_for_inputs
from .norm_rope import load_parts
from .online_softmax import absorb, soft_capped
from .split_sums import sum_own_splits, sum_splits


@triton.jit
def _rotated(
    rows,  # [R] pointers to heads
    inside,  # [R, D]
    gain,  # [D], weight of the norm of each head
    cos,  # [R, D]
    sin,  # [R, D], with the sign of its term
    dim,  # [D]
    partner,  # [D]
    part_stride,
    eps,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """[R, D] float32."""
    x = load_parts(rows[:, None] + dim[None, :], inside, part_stride, PARTS).to(tl.float32)
    swapped = load_parts(rows[:, None] + partner[None, :], inside, part_stride, PARTS)
    swapped = swapped.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        own = tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other = tl.load(gain + partner, mask=dim < DIM, other=0.0).to(tl.float32)
        x, swapped = x * scale * own[None, :], swapped * scale * other[None, :]
    return x * cos + swapped * sin


@triton.jit
def _angles(cos_sin, position, inside, dim, pair, is_first, ROT: tl.constexpr, HALF: tl.constexpr):
    """([R, D] cosines, [R, D] signed sines) of rows at these positions; float32."""
    row = cos_sin + position[:, None] * ROT + pair[None, :]
    rotates = inside & (dim < ROT)[None, :]
    cos = tl.load(row, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + HALF, mask=rotates, other=0.0).to(tl.float32)
    return cos, tl.where(is_first[None, :], -sin, sin)


# The number of splits is no constant: with the number of parts it would make too many kinds.
@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "splits", "least_keys"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "query_start_loc"],
)
def _rotary_attention_kernel(
    query,  # [T, Hq, D]; PARTS: [PARTS, T, Hq, D] float32, as key and value
    key,  # [T, Hkv, D]
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
    out,  # [T, Hq, D], contiguous
    partial,  # [splits, T, Hq, D] fp32
    lse,  # [splits, T, Hq] fp32, log2 of the softmax denominator; first inf: `out` is written
    arrivals,  # [N, Hkv] int32, zeros before and after
    scale,
    softcap,
    eps,
    num_reqs,
    num_tokens,
    splits,  # those have work that begin within the cached keys, the first always
    least_keys,  # cached keys of a split, but of the last with work
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
    BLOCK_N: tl.constexpr,
    NEW: tl.constexpr,  # rows for the step's own keys
    WINDOW: tl.constexpr,  # 0 = none
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    SOFTCAP: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    LAST_SUMS: tl.constexpr,  # the last program of a row sums its splits; 0 = another kernel does
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    dim_inside = (dim < DIM)[None, :]
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP

    # What the kernel just before does not write can be read before it has ended.
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    covered = tl.load(query_start_loc + num_reqs)
    cached = tl.maximum(tl.load(seq_lens + request) - query_len, 0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, cached - WINDOW + 1)
    length = tl.maximum(cached - low, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N, least_keys)
    active = tl.maximum(tl.cdiv(length, chunk), 1)
    low += split * chunk
    high = tl.minimum(cached, low + chunk)
    table = block_table + request.to(tl.int64) * table_stride
    cache_column = kv_head * DIM + dim
    if EARLY:
        at = tl.maximum(tl.minimum(low + tl.arange(0, BLOCK_N), high - 1), 0)
        page = tl.load(table + at // PAGE).to(tl.int64)
        line = tl.arange(0, (BLOCK_D + 63) // 64) * 64
        first = ((page * PAGE + at % PAGE) * KV_HEADS + kv_head) * DIM
        fetch_early(key_cache + first[:, None] + line[None, :])
        fetch_early(value_cache + first[:, None] + line[None, :])
    wait_for_inputs(PDL)

    if split == 0:  # token rows of no request are zeros, shared out among the programs
        for token in range(covered + request, num_tokens, stride):
            empty = (head.to(tl.int64) + token * Q_HEADS)[:, None] * DIM + dim[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], dtype)
            tl.store(out + empty, zeros, mask=(row < GROUP)[:, None] & dim_inside)
    if query_len <= 0:
        return
    # The split with the fewest cached keys takes the new ones; where a kernel sums the splits, one
    # without any, if there is one: both are then read at once.
    alone, takes_new = active == 1, active - 1
    if LAST_SUMS > 0:
        if split >= active:
            return
    else:
        if not alone:
            takes_new = splits - 1
        if (split >= active) & (split != takes_new):
            if not alone:
                flat = (split.to(tl.int64) * num_tokens + start + within) * Q_HEADS + head
                nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
                tl.store(lse + flat, nothing, mask=within < query_len)
            return

    half: tl.constexpr = ROT // 2
    if INTERLEAVED:
        partner, pair, is_first = dim ^ 1, dim // 2, dim % 2 == 0
    else:
        partner, pair, is_first = (dim + half) % ROT, dim % half, dim < half
    partner = tl.where(dim < ROT, partner, dim)
    valid = within < query_len
    token = (start + within).to(tl.int64)
    at_query = tl.load(positions + token, mask=valid, other=0)
    inside = valid[:, None] & dim_inside
    cos, sin = _angles(cos_sin, at_query, inside, dim, pair, is_first, ROT, half)
    base = query + token * q_stride_t + head * q_stride_h
    q = _rotated(
        base, inside, query_gain, cos, sin, dim, partner, part_stride, eps, DIM, NORM, PARTS
    ).to(dtype)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, log2 domain
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split == takes_new:
        new = tl.arange(0, NEW)
        is_new = new < query_len
        new_token = (start + new).to(tl.int64)
        at_key = tl.load(positions + new_token, mask=is_new, other=0)
        new_inside = is_new[:, None] & dim_inside
        new_cos, new_sin = _angles(cos_sin, at_key, new_inside, dim, pair, is_first, ROT, half)
        new_base = key + new_token * k_stride_t + kv_head * k_stride_h
        new_k = _rotated(
            new_base,
            new_inside,
            key_gain,
            new_cos,
            new_sin,
            dim,
            partner,
            part_stride,
            eps,
            DIM,
            NORM,
            PARTS,
        ).to(dtype)
        new_base = value + new_token * v_stride_t + kv_head * v_stride_h
        new_v = load_parts(new_base[:, None] + dim[None, :], new_inside, part_stride, PARTS).to(
            dtype
        )
        slot = tl.load(slot_mapping + new_token, mask=is_new, other=-1)
        target = slot[:, None] * (KV_HEADS * DIM) + cache_column[None, :]
        writes = new_inside & (slot >= 0)[:, None]
        tl.store(key_cache + target, new_k, mask=writes)
        tl.store(value_cache + target, new_v, mask=writes)
        new_scores = tl.dot(q, tl.trans(new_k), input_precision=PRECISION) * scale
        if SOFTCAP:
            new_scores = soft_capped(new_scores, softcap)
        new_visible = is_new[None, :] & (new[None, :] <= within[:, None])
        if WINDOW > 0:
            new_visible = new_visible & (new[None, :] > within[:, None] - WINDOW)
        top, total, acc = absorb(new_scores, new_visible, new_v, top, total, acc, PRECISION)

    for key_start in range(low, high, BLOCK_N):
        at = key_start + tl.arange(0, BLOCK_N)  # [BLOCK_N] key position
        present = at < high
        page = tl.load(table + at // PAGE, mask=present, other=0).to(tl.int64)
        offset = (page * PAGE + at % PAGE)[:, None] * (KV_HEADS * DIM) + cache_column[None, :]
        in_cache = present[:, None]
        if BLOCK_D != DIM:
            in_cache = in_cache & dim_inside
        k = tl.load(key_cache + offset, mask=in_cache, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = soft_capped(scores, softcap)
        visible = present[None, :] & valid[:, None]
        if WINDOW > 0:
            visible = visible & (at[None, :] > (cached + within)[:, None] - WINDOW)
        v = tl.load(value_cache + offset, mask=in_cache, other=0.0)
        top, total, acc = absorb(scores, visible, v, top, total, acc, PRECISION)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = valid[:, None] & dim_inside
    flat = token * Q_HEADS + head
    if alone:
        tl.store(out + flat[:, None] * DIM + dim[None, :], result.to(dtype), mask=mask)
        if LAST_SUMS == 0:
            if splits > 1:  # there is nothing to sum
                done = tl.full([BLOCK_M], float("inf"), tl.float32)
                tl.store(lse + flat, done, mask=valid)
    else:
        flat += split.to(tl.int64) * num_tokens * Q_HEADS
        tl.store(partial + flat[:, None] * DIM + dim[None, :], result, mask=mask)
        tl.store(lse + flat, top + tl.log2(total), mask=valid)
        if LAST_SUMS > 0:
            tl.debug_barrier()
            counter = arrivals + request * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                tl.debug_barrier()
                sum_own_splits(
                    partial,
                    lse,
                    out,
                    start,
                    query_len,
                    kv_head,
                    active,
                    num_tokens * Q_HEADS,
                    KV_HEADS,
                    GROUP,
                    DIM,
                    BLOCK_D,
                    LAST_SUMS,
                    MAX_SPLITS,
                )
                tl.store(counter, 0)


def rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Launch,
    arrivals: Tensor,
    interleaved: bool = False,
    norms: tuple[Tensor, Tensor, float] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See `kernels.rotary_attention.rotary_attention`; `plan.fused` must hold."""
    assert arrivals.numel() >= seq_lens.shape[0] * kv_cache.shape[3]
    parts = query.shape[0] if query.dim() == 4 else 0
    part_stride = query.stride(0) if parts else 0
    if parts:
        assert key.stride(0) == value.stride(0) == part_stride
        query, key, value = query[0], key[0], value[0]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert kv_cache.is_contiguous() and cos_sin_cache.is_contiguous()
    assert block_table.stride(-1) == 1
    num_tokens, num_heads, dim = query.shape
    num_reqs, (_, _, page, kv_heads, _) = seq_lens.shape[0], kv_cache.shape
    shape, splits = (num_tokens, num_heads, dim), plan.splits
    out = torch.empty(shape, dtype=kv_cache.dtype, device=query.device)
    if num_tokens == 0 or num_reqs == 0:
        return out.zero_()
    partial = lse = torch.empty(1, dtype=torch.float32, device=query.device)
    if splits > 1:
        partial = torch.empty(splits, *shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, *shape[:2], dtype=torch.float32, device=query.device)
    gains = (query, query) if norms is None else norms[:2]
    grid = (kv_heads, num_reqs) if plan.heads_first else (num_reqs, kv_heads)
    options = pdl_options(query)
    _rotary_attention_kernel[(*grid, splits)](
        query,
        key,
        value,
        positions,
        cos_sin_cache,
        slot_mapping,
        *gains,
        kv_cache[0],
        kv_cache[1],
        block_table,
        query_start_loc,
        seq_lens,
        out,
        partial,
        lse,
        arrivals,
        scale,
        1.0 if softcap is None else softcap,
        0.0 if norms is None else norms[2],
        num_reqs,
        num_tokens,
        splits,
        plan.least_keys,
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        part_stride,
        block_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        ROT=cos_sin_cache.shape[1],
        PAGE=page,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        NEW=FUSED_QUERY_LEN,
        WINDOW=sliding_window or 0,
        INTERLEAVED=interleaved,
        NORM=norms is not None,
        PARTS=parts,
        SOFTCAP=softcap is not None,
        HEADS_FIRST=plan.heads_first,
        EARLY=plan.early and options["PDL"],
        LAST_SUMS=plan.last_sums,
        MAX_SPLITS=MAX_SPLITS,
        PRECISION="tf32x3" if out.dtype == torch.float32 else "tf32",
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **options,
    )
    if splits > 1 and not plan.last_sums:
        sum_splits(partial, lse, query_start_loc, out, num_reqs)
    return out
