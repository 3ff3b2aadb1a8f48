"""How a call of the attention kernel is cut up: tile sizes and the number of KV splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from ..device import card_of

MAX_SPLITS = 16
FUSED_QUERY_LEN = 16  # new keys of a request that a fused kernel has room for
_MOST_FUSED = 1024  # programs; more of them are quicker in two kernels
_LAST_SUMS_VALUES = 2048  # of one split, that a program can sum those of all splits of
_LEAST_KEYS = 256  # that a split pays for, where programs fill much of a card without it


@dataclass(frozen=True)
class Launch:
    """How a call is cut up; a function of shapes only."""

    block_m: int
    block_q: int
    heads: int
    block_n: int
    splits: int
    one_block: bool
    num_warps: int
    num_stages: int
    heads_first: bool = False  # neighbouring programs take the heads of one request
    fused: bool = False  # rotary embedding and KV write inside
    last_sums: int = 0  # fused: rows whose splits are summed by the last program; 0 = by a kernel
    least_keys: int = 1  # fused: of a split that has work; how many have is seen in the kernel
    early: bool = False  # fused: the first keys are brought into L2 before the inputs are ready


@cache
def num_processors(device: torch.device) -> int:
    """Of a card; a few, elsewhere."""
    card = card_of(device)
    return 4 if card is None else card.num_processors


def plan_launch(
    num_reqs: int,
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    dim: int,
    max_query_len: int,
    max_keys: int,
    num_processors: int,
    element_size: int = 2,
) -> Launch:
    """Tile sizes and the number of KV splits for a call of these shapes.

    Kinds change with the number of programs, and hold for twice as many: powers of two of requests
    meet them all (see `dry_start`).
    """
    rows = group * max_query_len
    largest = 128 if dim <= 128 else 64 if dim <= 256 else 32
    if dim > 512:  # MLA: many heads share one KV row
        largest = 64
    block_n, stages = (64, 3) if dim <= 128 else (32, 2)
    if element_size > 2:  # tiles of the same number of bytes
        largest, block_n, stages = largest // 2, block_n // 2, 2
    block_m = max(16, min(largest, triton.next_power_of_2(rows)))
    heads = min(group, block_m)
    block_q = block_m // heads
    one_block = max_query_len <= block_q
    query_blocks = num_reqs if one_block else num_tokens // block_q + num_reqs
    programs = query_blocks * num_kv_heads * triton.cdiv(group, heads)
    fused = one_block and heads == group and max_query_len <= FUSED_QUERY_LEN and dim <= 128
    fused = fused and programs <= _MOST_FUSED
    # Two programs a processor hide latency; a split of less than 128 keys does not pay.
    most = 2 * num_processors
    num_warps = 8 if block_m * dim >= 128 * 128 else 4
    if one_block and dim <= 128 and (fused or not most // 2 < programs <= 2 * most):
        stages = 2
    fills = fused and most // 9 <= programs <= most  # much of the card, without splits
    own = triton.next_power_of_2(rows)
    can_sum = fills and own * triton.next_power_of_2(dim) <= _LAST_SUMS_VALUES
    if fills and block_m == 16 and dim == 128 and element_size == 2:
        if 2 * programs <= num_processors:
            block_n = 128
        elif programs > num_processors or max_query_len > 1:
            block_n, num_warps = 128, 8
        else:
            stages, most = 3, 2 * most
    splits = 1
    while splits < MAX_SPLITS and programs * splits * 2 <= most and max_keys >= 128 * splits * 2:
        splits *= 2
    last_sums = own if can_sum and splits > 1 else 0
    return Launch(
        block_m,
        block_q,
        heads,
        block_n,
        splits,
        one_block,
        num_warps=num_warps,
        num_stages=stages,
        heads_first=one_block,
        fused=fused,
        last_sums=last_sums,
        least_keys=_LEAST_KEYS if last_sums else 1,
        early=fused and 2 * programs <= num_processors,
    )


def plan_for(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, num_reqs: int, max_query_len: int
) -> Launch:
    """The plan for query [T, Hq, D], or its parts, over kv_cache [2, num_blocks, PAGE, Hkv, D]."""
    num_tokens, num_heads, dim = query.shape[-3:]
    page, kv_heads = kv_cache.shape[2:4]
    return plan_launch(
        num_reqs,
        num_tokens,
        kv_heads,
        num_heads // kv_heads,
        dim,
        max_query_len,
        block_table.shape[1] * page,
        num_processors(query.device),
        kv_cache.element_size(),
    )
