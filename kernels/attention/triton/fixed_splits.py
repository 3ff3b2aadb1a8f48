"""Paged attention in which the bits of a row depend on nothing but its own query and keys.

Keys are absorbed in splits of a fixed number of tokens that begin at fixed positions, each from a
fresh state, and the splits are merged in their order. Decodes, verified drafts and prompts have the
same tiles. Where few programs have work, each takes one split, and a second kernel merges them;
elsewhere a program absorbs and merges all splits of its rows. Both round after every multiplication
and addition (`enable_fp_fusion` is off), so that they agree.
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
from .online_softmax import LOG2E
from .paged_keys import absorb_tile, latent_arguments, paged_arguments
from .prefill import find_request

BLOCK_M = 64  # query rows of a program, tokens times heads: one instruction of a Hopper tensor core
_LEAST_SPLIT = 256  # keys
_MOST_SPLITS = 16
_MOST_PARTIAL_BYTES = 64 << 20


def keys_of_split(max_keys: int) -> int:
    """The keys of each split if requests have up to `max_keys`: a power of two, so that there are
    at most `_MOST_SPLITS`."""
    size: int = triton.next_power_of_2(triton.cdiv(max_keys, _MOST_SPLITS))
    return max(_LEAST_SPLIT, size)


@triton.jit
def _merge(top, total, acc, own_top, own_total, own_acc):
    """Add a split to a state; both may have absorbed no key."""
    new_top = tl.maximum(top, own_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - base)
    added = tl.exp2(own_top - base)
    total = total * kept + own_total * added
    acc = acc * kept[:, None] + own_acc * added[:, None]
    return new_top, total, acc


@triton.jit
def _first_state(
    sinks, head, valid, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, SINKS: tl.constexpr
):
    """The state before the first split: (top [ROWS], total [ROWS], acc [ROWS, BLOCK_V])."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    return top, total, tl.zeros([ROWS, BLOCK_V], tl.float32)


@triton.jit
def _result(total, acc, v_scale):
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= v_scale
    return result


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _fixed_kernel(
    query,  # [T, Hq, D]
    key_cache,  # [num_blocks, PAGE, Hkv, D]
    value_cache,  # [num_blocks, PAGE, Hkv, D]
    block_table,  # [N, max_blocks] int32
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, DIM_V], contiguous
    partial,  # [splits, T, Hq, DIM_V] fp32, sums of weighted values; unused if ALONE
    states,  # [splits, 2, T, Hq] fp32, maximum in the log2 domain and sum of weights
    scale,
    v_scale,  # of stored values; None unless the cache is e4m3
    softcap,
    num_reqs,
    num_tokens,
    q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
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
    SPLIT_KEYS: tl.constexpr,
    ALONE: tl.constexpr,  # a program takes all splits of its rows
    WINDOW: tl.constexpr,  # 0 = none
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MLA: tl.constexpr,
    PACKED: tl.constexpr,  # rows of MLA are packed; see `latent_rows`
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    DIMS: tl.constexpr = (DIM, DIM_REST, DIM_V, BLOCK_D, BLOCK_V)
    FORM: tl.constexpr = (PAGE, BLOCK_N, WINDOW, SOFTCAP, MLA, PACKED, PRECISION)
    wait_for_inputs(PDL)
    block, kv_block, num_blocks = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    head_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = kv_block // head_blocks
    row = tl.arange(0, BLOCK_M)
    in_group = (kv_block % head_blocks) * HEADS + row % HEADS
    head = kv_head * GROUP + in_group  # [BLOCK_M] query head
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_V)
    v_inside = (dim_v < DIM_V)[None, :]

    if ALONE:  # the programs share the work of zeroing token rows without a request
        covered = tl.load(query_start_loc + num_reqs)
        used = (row < HEADS) & (in_group < GROUP)
        for empty in range(covered + block, num_tokens, num_blocks):
            target = (head.to(tl.int64) + empty * Q_HEADS)[:, None] * DIM_V + dim_v[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_V], out.dtype.element_ty)
            tl.store(out + target, zeros, mask=used[:, None] & v_inside)

    request = find_request(query_start_loc, num_reqs, block, BLOCK_Q)
    start = tl.load(query_start_loc + request)
    first = (block - (start // BLOCK_Q + request)) * BLOCK_Q
    query_len = tl.load(query_start_loc + request + 1) - start
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    within = first + row // HEADS  # [BLOCK_M] query token within the request
    valid = (row < BLOCK_Q * HEADS) & (within < query_len) & (in_group < GROUP)
    position = seq_len - query_len + within  # [BLOCK_M] sequence position
    flat = (start + within).to(tl.int64) * Q_HEADS + head
    # keys [low, high) are visible to some row
    high = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)
    low, first_visible = 0, None
    if WINDOW > 0:
        first_visible = tl.maximum(0, seq_len - query_len + first - WINDOW + 1)
        low = first_visible // BLOCK_N * BLOCK_N
    begin, end = low // SPLIT_KEYS, tl.cdiv(tl.maximum(high, 0), SPLIT_KEYS)
    if not ALONE:
        own = tl.program_id(2)
        if (own < begin) | (own >= end):
            return
        begin, end = own, own + 1

    q_base = (
        query + (start + within).to(tl.int64)[:, None] * q_stride_t + head[:, None] * q_stride_h
    )
    q = tl.load(q_base + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    q_rest = q
    if DIM_REST > 0:
        rest = tl.arange(0, DIM_REST)
        q_rest = tl.load(q_base + DIM + rest[None, :], mask=valid[:, None], other=0.0)
    table = block_table + request.to(tl.int64) * table_stride
    top, total, acc = _first_state(sinks, head, valid, BLOCK_M, BLOCK_V, SINKS and ALONE)
    for split in range(begin, end):
        own_top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, log2 domain
        own_total = tl.zeros([BLOCK_M], tl.float32)
        own_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        first_key = tl.maximum(split * SPLIT_KEYS, low)
        for key_start in range(first_key, tl.minimum(high, (split + 1) * SPLIT_KEYS), BLOCK_N):
            own_top, own_total, own_acc = absorb_tile(
                (own_top, own_total, own_acc), q, q_rest, position,
                (key_cache, value_cache, k_stride_b, k_stride_t, k_stride_h,
                 v_stride_b, v_stride_t, v_stride_h),
                table, kv_head, key_start, first_visible, high, scale, softcap, DIMS, FORM,
            )  # fmt: skip
        top, total, acc = _merge(top, total, acc, own_top, own_total, own_acc)

    place = flat[:, None] * DIM_V + dim_v[None, :]
    mask = valid[:, None] & v_inside
    if ALONE:
        tl.store(out + place, _result(total, acc, v_scale).to(out.dtype.element_ty), mask=mask)
    else:
        rows_of_split = begin * num_tokens.to(tl.int64) * Q_HEADS
        tl.store(partial + rows_of_split * DIM_V + place, acc, mask=mask)
        tl.store(states + 2 * rows_of_split + flat, top, mask=valid)
        second = 2 * rows_of_split + num_tokens * Q_HEADS
        tl.store(states + second + flat, total, mask=valid)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _merge_kernel(
    query_start_loc,  # [N + 1] int32
    seq_lens,  # [N] int32
    sinks,  # [Hq]
    out,  # [T, Hq, DIM_V], contiguous
    partial,  # as the rest in `_fixed_kernel`
    states,
    v_scale,
    num_reqs,
    num_tokens,
    Q_HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head < Q_HEADS
    dim = tl.arange(0, BLOCK_V)
    inside = valid[:, None] & (dim < DIM_V)[None, :]
    top, total, acc = _first_state(sinks, head, valid, HEADS, BLOCK_V, SINKS)
    flat = token.to(tl.int64) * Q_HEADS + head
    place = flat[:, None] * DIM_V + dim[None, :]
    if token < tl.load(query_start_loc + num_reqs):
        low, high = 0, num_reqs
        while low < high:  # the request is the last that begins at or before the token
            middle = (low + high) // 2
            if tl.load(query_start_loc + middle) <= token:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        end = tl.load(query_start_loc + request + 1)
        visible = tl.load(seq_lens + request) - end + token + 1  # keys up to its own
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(0, visible - WINDOW) // SPLIT_KEYS
        for split in range(begin, tl.cdiv(tl.maximum(visible, 0), SPLIT_KEYS)):
            rows_of_split = split * num_tokens.to(tl.int64) * Q_HEADS
            own_top = tl.load(states + 2 * rows_of_split + flat, mask=valid, other=float("-inf"))
            second = 2 * rows_of_split + num_tokens * Q_HEADS
            own_total = tl.load(states + second + flat, mask=valid, other=0.0)
            own_acc = tl.load(partial + rows_of_split * DIM_V + place, mask=inside, other=0.0)
            top, total, acc = _merge(top, total, acc, own_top, own_total, own_acc)
        result = _result(total, acc, v_scale)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


# The arguments that `_merge_kernel` shares with `_fixed_kernel`.
_MERGED = frozenset(
    ("query_start_loc", "seq_lens", "sinks", "out", "partial", "states", "v_scale", "num_reqs")
    + ("num_tokens", "Q_HEADS", "DIM_V", "BLOCK_V", "SPLIT_KEYS", "WINDOW", "SINKS", "PDL")
    + ("enable_fp_fusion", "launch_pdl")
)


def _tiles(dim: int, element_size: int) -> tuple[int, int, int]:
    """(keys of a tile, warps, stages) for heads of `dim` values."""
    if dim <= 128:
        block_n, num_warps, stages = 64, 4, 2
    else:
        block_n, num_warps, stages = 32, 8, 2
    return (block_n if element_size <= 2 else block_n // 2), num_warps, stages


def fixed_attention(
    query: Tensor,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
    out: Tensor,
    alone: bool | None = None,
) -> None:
    """`paged_attention` into `out` [T, Hq, Dv].

    `alone` overrides whether a program takes all splits of its rows; the result is the same.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs, dim_v = rows.seq_lens.shape[0], out.shape[-1]
    page, num_kv_heads = kv_cache.shape[-3:-1]
    assert out.is_contiguous()
    if num_tokens == 0 or num_reqs == 0:
        out.zero_()
        return
    group = num_heads // num_kv_heads
    heads = min(group, BLOCK_M)
    block_q = BLOCK_M // heads
    query_blocks = num_tokens // block_q + num_reqs
    head_blocks = num_kv_heads * triton.cdiv(group, heads)
    max_keys = rows.block_table.shape[1] * page
    split_keys = keys_of_split(max_keys)
    splits = triton.cdiv(max_keys, split_keys)
    values = splits * num_tokens * num_heads
    if alone is None:
        many = query_blocks * head_blocks > 2 * num_processors(query.device)
        alone = splits == 1 or many or 4 * values * dim_v > _MOST_PARTIAL_BYTES
    partial = states = out
    if not alone:
        partial = torch.empty(values * dim_v, dtype=torch.float32, device=query.device)
        states = torch.empty(2 * values, dtype=torch.float32, device=query.device)
    block_n, num_warps, stages = _tiles(head_dim, query.element_size())
    arguments = paged_arguments(query, kv_cache, rows, rule, out)
    arguments |= latent_arguments(query, rule, out)
    arguments |= {"partial": partial, "states": states, "SPLIT_KEYS": split_keys}
    arguments |= {"enable_fp_fusion": False, **pdl_options(query)}
    _fixed_kernel[(head_blocks, query_blocks, 1 if alone else splits)](
        **arguments,
        HEADS=heads,
        BLOCK_M=BLOCK_M,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        ALONE=alone,
        num_warps=num_warps,
        num_stages=stages,
    )
    if alone:
        return
    merged = max(1, min(triton.next_power_of_2(num_heads), 2048 // arguments["BLOCK_V"]))
    of_batch = {name: arguments[name] for name in arguments if name in _MERGED}
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, merged))](
        **of_batch, HEADS=merged, num_warps=4
    )


hash_functions(globals())
