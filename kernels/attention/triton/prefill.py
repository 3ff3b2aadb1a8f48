"""Paged attention of long queries: the part of `paged_attention` that prompts spend their time in.

Keys that all query tokens of a program see are absorbed without masks; only the last tiles, where
the causal border lies, are masked. Late query blocks have the most keys, so they start first. The
programs find the blocks of long requests themselves, so short requests beside them cost none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import num_processors
from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..paged_rows import AttentionRule, PagedRows
from .attention_plan import prefill_splits
from .online_softmax import LEAST, LOG2E, soft_capped
from .paged_keys import paged_arguments
from .split_sums import sum_splits


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of a launch."""

    block_m: int  # query rows of a program, tokens times heads
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int


MAX_DIM = 128  # the largest head size
# The fastest of 11 on an H200 (tests/lab/measure_prefill.py), for heads of 128 values.
_TILES = Tiles(64, 64, 4, 2)
_MORE_BLOCKS = 16
_LEAST_KEYS = 4096  # of a split; the second kernel costs about as much as 1,000 keys


@triton.jit
def find_request(query_start_loc, num_reqs, block, BLOCK_Q: tl.constexpr):
    """Find the request of a query block: request i owns the blocks from start_i // BLOCK_Q + i."""
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _absorb_tile(
    q, key_rows, value_rows, table, key_start, high, key, last, dim_inside,
    top, total, acc, scale, softcap, k_stride_b, v_stride_b,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    FULL_DIM: tl.constexpr,
):  # fmt: skip
    """Add the keys from `key_start` on to the running softmax: the new (top, total, acc).

    Without MASKED every row sees every key of the tile. `last` [M] is a row's last visible key.
    """
    at = key_start + key
    if MASKED:
        exists = at < high
        page = tl.load(table + at // PAGE, mask=exists, other=0).to(tl.int64)
        inside = exists[:, None]
        if not FULL_DIM:
            inside = inside & dim_inside[None, :]
        k = tl.load(key_rows + (page * k_stride_b)[:, None], mask=inside, other=0.0)
    else:
        page = tl.load(table + at // PAGE).to(tl.int64)
        inside = dim_inside[None, :]
        if FULL_DIM:
            k = tl.load(key_rows + (page * k_stride_b)[:, None])
        else:
            k = tl.load(key_rows + (page * k_stride_b)[:, None], mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)))
    factor = scale * LOG2E
    if SOFTCAP:
        scores = soft_capped(scores * scale, softcap)
        factor = LOG2E
    if MASKED:
        visible = at[None, :] <= last[:, None]
        if WINDOW > 0:
            visible = visible & (at[None, :] > last[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    rescale = tl.exp2(top - new_top)
    weights = tl.exp2(scores * factor - new_top[:, None])
    total = total * rescale + tl.sum(weights, 1)
    if MASKED or not FULL_DIM:
        v = tl.load(value_rows + (page * v_stride_b)[:, None], mask=inside, other=0.0)
    else:
        v = tl.load(value_rows + (page * v_stride_b)[:, None])
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None])
    return new_top, total, acc


@triton.jit
def _attend_block(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, sinks, out, partial, lse,
    scale, v_scale, softcap, num_tokens, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h, table_stride,
    request, first, split, kv_head, row, in_group, dim,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D:
    tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N:
    tl.constexpr, SPLITS: tl.constexpr, LEAST_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP:
    tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend with the query tokens of a request from `first` on, over one split of the keys."""
    head = kv_head * GROUP + in_group  # [BLOCK_M] query head
    dim_inside = dim < DIM
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    cached = tl.load(seq_lens + request) - query_len  # keys before the request's queries
    within = first + row // HEADS  # [BLOCK_M] query token within the request
    valid = (row < BLOCK_Q * HEADS) & (within < query_len) & (in_group < GROUP)
    last = cached + within  # [BLOCK_M] position, the last key that the row sees
    token = (start + within).to(tl.int64)
    high = cached + tl.minimum(query_len, first + BLOCK_Q)  # end of the keys that some row sees
    low = 0
    masked_from = (cached + first + 1) // BLOCK_N * BLOCK_N  # all rows see all keys before it
    if WINDOW > 0:
        low = tl.maximum(0, cached + first - WINDOW + 1)
        masked_from = low
    active = 1  # splits with work
    if SPLITS > 1:
        chunk = tl.maximum(tl.cdiv(tl.cdiv(high - low, SPLITS), BLOCK_N) * BLOCK_N, LEAST_KEYS)
        active = tl.cdiv(high - low, chunk)
        low += split * chunk
        high = tl.minimum(high, low + chunk)
        masked_from = tl.minimum(tl.maximum(masked_from, low), high) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            masked_from = low
    flat = token * Q_HEADS + head

    q_rows = query + token[:, None] * q_stride_t + head[:, None] * q_stride_h
    q = tl.load(q_rows + dim[None, :], mask=valid[:, None] & dim_inside[None, :], other=0.0)
    top = tl.full([BLOCK_M], LEAST, tl.float32)  # running maximum, log2 domain
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    key = tl.arange(0, BLOCK_N)
    table = block_table + request.to(tl.int64) * table_stride
    key_rows = key_cache + kv_head * k_stride_h + dim[None, :]
    value_rows = value_cache + kv_head * v_stride_h + dim[None, :]
    if BLOCK_N % PAGE == 0 and WINDOW == 0:  # places in pages are alike in all tiles
        key_rows += ((key % PAGE) * k_stride_t)[:, None]
        value_rows += ((key % PAGE) * v_stride_t)[:, None]
        for key_start in range(low, masked_from, BLOCK_N):
            top, total, acc = _absorb_tile(
                q, key_rows, value_rows, table, key_start, high, key, last, dim_inside,
                top, total, acc, scale, softcap, k_stride_b, v_stride_b,
                PAGE, WINDOW, SOFTCAP, False, BLOCK_D == DIM,
            )  # fmt: skip
        for key_start in range(tl.maximum(masked_from, low), high, BLOCK_N):
            top, total, acc = _absorb_tile(
                q, key_rows, value_rows, table, key_start, high, key, last, dim_inside,
                top, total, acc, scale, softcap, k_stride_b, v_stride_b,
                PAGE, WINDOW, SOFTCAP, True, BLOCK_D == DIM,
            )  # fmt: skip
    else:
        for key_start in range(low, high, BLOCK_N):
            place = ((key_start + key) % PAGE)[:, None]
            top, total, acc = _absorb_tile(
                q, key_rows + place * k_stride_t, value_rows + place * v_stride_t,
                table, key_start, high, key, last, dim_inside,
                top, total, acc, scale, softcap, k_stride_b, v_stride_b,
                PAGE, WINDOW, SOFTCAP, True, BLOCK_D == DIM,
            )  # fmt: skip

    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    if v_scale is not None:
        result *= v_scale
    place = flat[:, None] * DIM + dim[None, :]
    mask = valid[:, None] & dim_inside[None, :]
    if SPLITS == 1:
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    else:
        # in split 0: inf if there is nothing to sum; of a split without work: -inf
        sums = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        if active == 1:
            sums = tl.full([BLOCK_M], float("inf"), tl.float32)
            tl.store(out + place, result.to(out.dtype.element_ty), mask=mask & (split == 0))
        else:
            own = split.to(tl.int64) * num_tokens * Q_HEADS
            tl.store(partial + own * DIM + place, result, mask=mask & (split < active))
        at = split.to(tl.int64) * num_tokens * Q_HEADS + flat
        tl.store(lse + at, sums, mask=valid)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "longer_than"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _prefill_kernel(
    query,  # [T, Hq, D]
    key_cache,  # [num_blocks, PAGE, Hkv, D]
    value_cache,  # [num_blocks, PAGE, Hkv, D]
    block_table,  # [N, max_blocks] int32
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, D], contiguous
    partial,  # [SPLITS, T, Hq, D] fp32
    lse,  # [SPLITS, T, Hq] fp32, log2 of the softmax denominator; inf in split 0: `out` is final
    scale,
    v_scale,  # of stored values; None unless the cache is e4m3
    softcap,
    num_reqs,
    num_tokens,
    longer_than,  # requests with at most this many new tokens are skipped
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
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens of one program
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # at least N
    ONE_EACH: tl.constexpr,  # a program for every block that a request may have
    SPLITS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,  # of a split
    WINDOW: tl.constexpr,  # 0 = none
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    stride, split = tl.num_programs(0), tl.program_id(2)
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // head_blocks
    row = tl.arange(0, BLOCK_M)
    in_group = (tl.program_id(1) % head_blocks) * HEADS + row % HEADS
    head = kv_head * GROUP + in_group  # [BLOCK_M] query head
    dim = tl.arange(0, BLOCK_D)
    dim_inside = dim < DIM
    used = (row < HEADS) & (in_group < GROUP)

    if split == 0:  # the programs share the work of zeroing token rows without a request
        covered = tl.load(query_start_loc + num_reqs)
        for empty in range(covered + tl.program_id(0), num_tokens, stride):
            target = (head.to(tl.int64) + empty * Q_HEADS)[:, None] * DIM + dim[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
            tl.store(out + target, zeros, mask=used[:, None] & dim_inside[None, :])
        if SPLITS > 1:  # and of telling the second kernel to leave the rows of skipped requests
            for request in range(tl.program_id(0), num_reqs, stride):
                start = tl.load(query_start_loc + request)
                end = tl.load(query_start_loc + 1 + request)
                if end - start <= longer_than:
                    for token in range(start, end):
                        final = tl.full([BLOCK_M], float("inf"), tl.float32)
                        tl.store(lse + head.to(tl.int64) + token * Q_HEADS, final, mask=used)

    if ONE_EACH:
        block = stride - 1 - tl.program_id(0)
        request = find_request(query_start_loc, num_reqs, block, BLOCK_Q)
        start = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - start
        first = (block - (start // BLOCK_Q + request)) * BLOCK_Q
        if (first < query_len) & (query_len > longer_than):
            _attend_block(
                query, key_cache, value_cache, block_table, query_start_loc, seq_lens, sinks,
                out, partial, lse,
                scale, v_scale, softcap, num_tokens, q_stride_t, q_stride_h, k_stride_b, k_stride_t,
                k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride,
                request, first, split, kv_head, row, in_group, dim,
                Q_HEADS, GROUP, HEADS, DIM, BLOCK_D, PAGE, BLOCK_M, BLOCK_Q, BLOCK_N, SPLITS,
                LEAST_KEYS, WINDOW, SOFTCAP, SINKS,
            )  # fmt: skip
    else:
        each = tl.arange(0, BLOCK_R)
        lens = tl.load(query_start_loc + 1 + each, mask=each < num_reqs, other=0)
        lens -= tl.load(query_start_loc + each, mask=each < num_reqs, other=0)
        own = tl.where(lens > longer_than, tl.cdiv(lens, BLOCK_Q), 0)  # blocks of each request
        upto = tl.cumsum(own, 0)
        num_blocks = tl.max(upto, 0)
        for index in range(tl.program_id(0), num_blocks, stride):
            block = num_blocks - 1 - index
            request = tl.sum((upto <= block).to(tl.int32), 0)
            first = (block - tl.sum(tl.where(each == request, upto - own, 0), 0)) * BLOCK_Q
            _attend_block(
                query, key_cache, value_cache, block_table, query_start_loc, seq_lens, sinks,
                out, partial, lse,
                scale, v_scale, softcap, num_tokens, q_stride_t, q_stride_h, k_stride_b, k_stride_t,
                k_stride_h, v_stride_b, v_stride_t, v_stride_h, table_stride,
                request, first, split, kv_head, row, in_group, dim,
                Q_HEADS, GROUP, HEADS, DIM, BLOCK_D, PAGE, BLOCK_M, BLOCK_Q, BLOCK_N, SPLITS,
                LEAST_KEYS, WINDOW, SOFTCAP, SINKS,
            )  # fmt: skip


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    out: Tensor,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> None:
    """Attend as `paged_attention` does, and write the result into `out` [T, Hq, D].

    It serves layers without MLA whose heads have up to MAX_DIM values. It is one launch, and a
    second one that sums the splits if there are several.

    The number of splits depends on shapes only, so a graph may hold the launch; the kernel itself
    finds how many of them have work.
    """
    num_tokens, num_heads, dim = query.shape
    num_reqs, (_, _, page, kv_heads, _) = rows.seq_lens.shape[0], kv_cache.shape
    tiles = tiles or _TILES
    group = num_heads // kv_heads
    heads = min(group, tiles.block_m)
    block_q = tiles.block_m // heads
    head_blocks = kv_heads * triton.cdiv(group, heads)
    if splits is None:  # most requests of a graph are absent, so their blocks do not count
        programs = triton.cdiv(num_tokens, block_q) * head_blocks
        max_keys = rows.block_table.shape[1] * page
        splits = prefill_splits(programs, max_keys // _LEAST_KEYS, num_processors(query.device))
    partial = lse = out
    if splits > 1:
        shape = (splits, num_tokens, num_heads)
        partial = torch.empty(*shape, dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    # Each request may add a block. Of many requests in a graph most are short or absent, so that
    # programs find the blocks of long ones, and loop over them if they are more than expected.
    one_each = num_reqs <= _MORE_BLOCKS
    blocks = num_tokens // block_q + max(1, min(num_reqs, _MORE_BLOCKS))
    grid = (blocks, head_blocks, splits)
    _prefill_kernel[grid](
        **paged_arguments(query, kv_cache, rows, rule, out),
        partial=partial,
        lse=lse,
        longer_than=rows.longer_than,
        HEADS=heads,
        BLOCK_M=tiles.block_m,
        BLOCK_Q=block_q,
        BLOCK_N=tiles.block_n,
        BLOCK_R=max(16, 1 << 2 * -(-(num_reqs - 1).bit_length() // 2)),  # a power of four
        ONE_EACH=one_each,
        SPLITS=splits,
        LEAST_KEYS=_LEAST_KEYS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(query),
    )
    if splits > 1:
        sum_splits(partial, lse, rows.query_start_loc, out, num_reqs)


hash_functions(globals())
