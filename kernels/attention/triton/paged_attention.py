"""Triton version of `kernels.attention.paged_attention`, for decode, verification and prefill, GQA
and MLA.

A launch depends on the sizes of tensors and never on their contents, so a graph may hold it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import num_processors
from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..paged_rows import AttentionRule, PagedRows
from .attention_plan import Launch, hopper_prefill_wanted, plan_launch
from .fixed_splits import fixed_attention
from .online_softmax import LOG2E
from .paged_keys import absorb_tile, latent_arguments, paged_arguments
from .prefill import MAX_DIM, find_request, prefill_attention
from .split_sums import sum_splits

_FEW_LONG = 8  # requests that a launch for long ones is planned for


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "longer_than", "max_query_len"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _attention_kernel(
    query,  # [T, Hq, D]
    key_cache,  # [num_blocks, PAGE, Hkv, D]
    value_cache,  # [num_blocks, PAGE, Hkv, D]
    block_table,  # [N, max_blocks] int32
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, DIM_V], contiguous
    partial,  # [SPLITS, T, Hq, DIM_V] fp32
    lse,  # [SPLITS, T, Hq] fp32, log2 of the softmax denominator; inf in split 0: `out` is final
    scale,
    v_scale,  # of stored values; None unless the cache is e4m3
    softcap,
    num_reqs,
    num_tokens,
    longer_than,  # requests with at most this many new tokens are skipped
    max_query_len,  # requests with more new tokens are skipped
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    table_stride,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # query heads of one program
    DIM: tl.constexpr,  # main part of the head
    DIM_REST: tl.constexpr,  # size of the rotary part after it, which V leaves out (MLA), or 0
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens of one program
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    ONE_BLOCK: tl.constexpr,  # each request's queries fit into one program
    HEADS_FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MLA: tl.constexpr,
    PACKED: tl.constexpr,  # rows of MLA are packed; see `latent_rows`
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    DIMS: tl.constexpr = (DIM, DIM_REST, DIM_V, BLOCK_D, BLOCK_V)
    FORM: tl.constexpr = (PAGE, BLOCK_N, WINDOW, SOFTCAP, MLA, PACKED, PRECISION)
    wait_for_inputs(PDL)
    block, kv_block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if HEADS_FIRST:
        block, kv_block, num_blocks = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = kv_block // head_blocks
    head_block = kv_block % head_blocks
    split = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    in_group = head_block * HEADS + row % HEADS
    head = kv_head * GROUP + in_group  # [BLOCK_M] query head
    dim_v = tl.arange(0, BLOCK_V)

    if SPLITS == 1:  # the programs share the work of zeroing token rows without a request
        covered = tl.load(query_start_loc + num_reqs)
        used = (row < HEADS) & (in_group < GROUP)
        for token in range(covered + block, num_tokens, num_blocks):
            at = head.to(tl.int64) + token * Q_HEADS
            target = at[:, None] * DIM_V + dim_v[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_V], out.dtype.element_ty)
            tl.store(out + target, zeros, mask=used[:, None] & (dim_v < DIM_V)[None, :])

    if ONE_BLOCK:
        request = block
        start = tl.load(query_start_loc + request)
        first = 0
    else:
        request = find_request(query_start_loc, num_reqs, block, BLOCK_Q)
        start = tl.load(query_start_loc + request)
        first = (block - (start // BLOCK_Q + request)) * BLOCK_Q
    query_len = tl.load(query_start_loc + request + 1) - start
    if (first >= query_len) | (query_len > max_query_len):
        return
    seq_len = tl.load(seq_lens + request)
    within = first + row // HEADS  # [BLOCK_M] query token within the request
    valid = (row < BLOCK_Q * HEADS) & (within < query_len) & (in_group < GROUP)
    position = seq_len - query_len + within  # [BLOCK_M] sequence position
    token = (start + within).to(tl.int64)
    if query_len <= longer_than:
        if SPLITS > 1:
            if split == 0:  # tell the second kernel to leave these rows
                final = tl.full([BLOCK_M], float("inf"), tl.float32)
                tl.store(lse + token * Q_HEADS + head, final, mask=valid)
        return

    # Keys [low, high) are visible to some row; this program reads one chunk of them.
    high = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, seq_len - query_len + first - WINDOW + 1)
    chunk = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), SPLITS), BLOCK_N) * BLOCK_N
    low += split * chunk
    high = tl.minimum(high, low + chunk)

    dim = tl.arange(0, BLOCK_D)
    q_base = query + token[:, None] * q_stride_t + head[:, None] * q_stride_h
    q = tl.load(q_base + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    q_rest = q
    if DIM_REST > 0:
        rest = tl.arange(0, DIM_REST)
        q_rest = tl.load(q_base + DIM + rest[None, :], mask=valid[:, None], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, log2 domain
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    for key_start in range(low, high, BLOCK_N):
        top, total, acc = absorb_tile(
            (top, total, acc), q, q_rest, position,
            (key_cache, value_cache, k_stride_b, k_stride_t, k_stride_h,
             v_stride_b, v_stride_t, v_stride_h),
            block_table + request.to(tl.int64) * table_stride, kv_head, key_start, None, high,
            scale, softcap, DIMS, FORM,
        )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= v_scale
    mask = valid[:, None] & (dim_v < DIM_V)[None, :]
    flat = token * Q_HEADS + head
    if SPLITS == 1:
        target = out + flat[:, None] * DIM_V + dim_v[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)
    else:
        flat += split.to(tl.int64) * num_tokens * Q_HEADS
        tl.store(partial + flat[:, None] * DIM_V + dim_v[None, :], result, mask=mask)
        tl.store(lse + flat, top + tl.log2(total), mask=valid)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `kernels.attention.paged_attention`; `splits` overrides the planned number."""
    dim_v = rule.head_dim_v or query.shape[-1]
    if out is None:
        out = torch.empty(*query.shape[:2], dim_v, dtype=query.dtype, device=query.device)
    if rows.fixed:
        fixed_attention(query, kv_cache, rows, rule, out)
        return out
    for launch in rows.by_length() if rows.short_len else (rows,):
        _attend(query, kv_cache, launch, rule, splits, out)
    return out


def _is_prefill(launch: Launch, query: Tensor, kv_cache: Tensor, rule: AttentionRule) -> bool:
    """Whether the kernel of long queries serves this launch."""
    same_dtype = query.dtype == rule.dtype_of(kv_cache) and query.element_size() == 2
    fits = not rule.is_mla and query.shape[-1] <= MAX_DIM
    return same_dtype and fits and not launch.one_block


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    splits: int | None,
    out: Tensor,  # [T, Hq, Dv]
) -> None:
    """Attend with one launch, and one more that sums the splits if there are several.

    The sum also writes rows of requests that the launch skips; the launch of those comes later.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs, dim_v = rows.seq_lens.shape[0], out.shape[-1]
    page, num_kv_heads = kv_cache.shape[-3:-1]
    group = num_heads // num_kv_heads
    if num_tokens == 0 or num_reqs == 0:
        out.zero_()
        return
    # Of a batch that has a launch for its short requests, few are long.
    launch = plan_launch(
        min(num_reqs, _FEW_LONG) if rows.longer_than else num_reqs,
        num_tokens,
        num_kv_heads,
        group,
        head_dim,
        rows.max_query_len,
        rows.block_table.shape[1] * page,
        num_processors(query.device),
        query.element_size(),
    )
    if splits is None and _is_prefill(launch, query, kv_cache, rule):
        if hopper_prefill_wanted(query):
            from .hopper_prefill import (
                fits,
                hopper_prefill,
            )  # Gluon is an experimental part of Triton

            if fits(query, kv_cache, rows, rule):
                hopper_prefill(query, kv_cache, rows, rule, out)
                return
        prefill_attention(query, kv_cache, rows, rule, out)
        return
    if splits is None:
        splits = 1 if launch.only_long else launch.splits
    partial, lse = out, out
    if splits > 1:
        shape = (splits, num_tokens, num_heads)
        partial = torch.empty(*shape, dim_v, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    query_blocks = num_reqs
    if not launch.one_block:
        query_blocks = num_tokens // launch.block_q + num_reqs
    head_blocks = triton.cdiv(group, launch.heads)
    grid = (query_blocks, num_kv_heads * head_blocks, splits)
    if launch.heads_first:
        grid = (grid[1], grid[0], splits)
    _attention_kernel[grid](
        **paged_arguments(query, kv_cache, rows, rule, out),
        **latent_arguments(query, rule, out),
        partial=partial,
        lse=lse,
        longer_than=rows.longer_than,
        max_query_len=rows.max_query_len,
        HEADS=launch.heads,
        BLOCK_M=launch.block_m,
        BLOCK_Q=launch.block_q,
        BLOCK_N=launch.block_n,
        SPLITS=splits,
        ONE_BLOCK=launch.one_block,
        HEADS_FIRST=launch.heads_first,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **pdl_options(query),
    )
    if splits > 1:
        sum_splits(partial, lse, rows.query_start_loc, out, num_reqs)


hash_functions(globals())
