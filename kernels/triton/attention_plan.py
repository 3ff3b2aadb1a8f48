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
# What follows won in `tests/gpu/measure_chain.py attention` on an H200.
_PER_PROCESSOR = 2  # programs that hide each other's latency
# A ninth of those fills much of the card: 4 requests of 8 key heads on 132 processors.
_LEAST_FILL = 9
_LEAST_KEYS = 256  # that a split pays for, where programs fill much of the card without it
_KEYS_OF_A_SPLIT = 128  # at least, of the longest context, elsewhere


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


def _tile_sizes(rows: int, dim: int, element_size: int) -> tuple[int, int, int]:
    """(rows of a tile of queries, keys of a tile, stages), before programs are counted."""
    largest = 128 if dim <= 128 else 64 if dim <= 256 else 32
    if dim > 512:  # MLA: many heads share one KV row
        largest = 64
    block_n, stages = (64, 3) if dim <= 128 else (32, 2)
    if element_size > 2:  # tiles of the same number of bytes
        largest, block_n, stages = largest // 2, block_n // 2, 2
    return max(16, min(largest, triton.next_power_of_2(rows))), block_n, stages


def _decode_tiles(programs: int, num_processors: int, max_query_len: int) -> tuple[int, ...]:
    """(keys of a tile, stages, warps, most programs with all splits) for 16 rows and heads of 128,
    where programs fill much of the card: few have their keys at once in a wide tile, more share
    processors, so that single tokens want small tiles and more splits."""
    most = _PER_PROCESSOR * num_processors
    if 2 * programs <= num_processors:
        return 128, 2, 4, most
    if programs > num_processors or max_query_len > 1:
        return 128, 2, 8, most
    return 64, 3, 4, 2 * most


def _num_splits(programs: int, max_keys: int, most: int) -> int:
    """A power of two: as many as give no more than `most` programs, and keep splits long enough."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and programs * splits * 2 <= most
        and max_keys >= _KEYS_OF_A_SPLIT * splits * 2
    ):
        splits *= 2
    return splits


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

    The main kernel's kinds change with the number of programs, and hold for twice as many: the
    powers of two of `dry_start` meet them all.
    """
    rows = group * max_query_len
    block_m, block_n, stages = _tile_sizes(rows, dim, element_size)
    heads = min(group, block_m)
    block_q = block_m // heads
    one_block = max_query_len <= block_q
    query_blocks = num_reqs if one_block else num_tokens // block_q + num_reqs
    programs = query_blocks * num_kv_heads * triton.cdiv(group, heads)
    fused = one_block and heads == group and max_query_len <= FUSED_QUERY_LEN and dim <= 128
    fused = fused and programs <= _MOST_FUSED
    most = _PER_PROCESSOR * num_processors
    fills = fused and most // _LEAST_FILL <= programs <= most
    num_warps = 8 if block_m * dim >= 128 * 128 else 4
    if one_block and dim <= 128 and (fused or not most // 2 < programs <= 2 * most):
        stages = 2
    if fills and block_m == 16 and dim == 128 and element_size == 2:
        tiles = _decode_tiles(programs, num_processors, max_query_len)
        block_n, stages, num_warps, most = tiles
    splits = _num_splits(programs, max_keys, most)
    own = triton.next_power_of_2(rows)
    can_sum = fills and own * triton.next_power_of_2(dim) <= _LAST_SUMS_VALUES
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
