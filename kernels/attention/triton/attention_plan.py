"""How a call of the attention kernel is cut up: tile sizes and the number of KV splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...device import cache_by_device, card_of
from ..paged_rows import PagedRows

MAX_SPLITS = 16
FUSED_QUERY_LEN = 16  # new keys of a request that a fused kernel has room for
_LAST_SUMS_VALUES = 2048  # of one split, that a program can sum those of all splits of
# What follows won in `tests/lab/measure_chain.py attention` on an H200.
_PER_PROCESSOR = 2  # programs that hide each other's latency
_FEW = 16  # fewer programs of large heads want as many splits as there are, summed by a kernel
_LEAST_KEYS = 128  # that a split pays for, where programs are more
_ALONE = 16384  # values of keys that a program reads without sharing them
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
    alone: int = 0  # fused: keys up to which only one split has work
    registers: int | None = None  # fused: of a thread, at most
    rows: int = 0  # fused: of block_m, those that hold something; a power of two
    early: bool = False  # fused: the first keys are brought into L2 before the inputs are ready


@cache_by_device
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


def _decode_tiles(programs: int, num_processors: int, dim: int) -> tuple[int, int, int, int | None]:
    """(keys of a tile, stages, warps, registers of a thread) for 16 rows: few programs have many
    keys at once in wide tiles; many are small, so that a processor has room for more of them, down
    to one warp, which waits for no other."""
    if programs > 5 * num_processors:
        return (16, 4, 1, None) if dim > 64 else (32, 3, 1, None)
    if dim > 64 and 2 * programs > 5 * num_processors:
        return 64, 2, 4, 128 if dim == 128 else None
    if dim > 64 and programs < _FEW:
        return 64, 2, 4, None
    return 128, 2, 4, None


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
    most = _PER_PROCESSOR * num_processors
    num_warps = 8 if block_m * dim >= 128 * 128 else 4
    if one_block and dim <= 128 and (fused or not most // 2 < programs <= 2 * most):
        stages = 2
    registers = None
    if fused and block_m == 16 and element_size == 2:
        tiles = _decode_tiles(programs, num_processors, dim)
        block_n, stages, num_warps, registers = tiles
    splits = _num_splits(programs, max_keys, most)
    own = triton.next_power_of_2(rows)
    can_sum = fused and splits > 1 and own * triton.next_power_of_2(dim) <= _LAST_SUMS_VALUES
    last_sums = own if can_sum and (programs >= _FEW or dim <= 64) else 0
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
        rows=min(own, block_m),
        registers=registers,
        least_keys=_LEAST_KEYS if last_sums else 1,
        alone=_ALONE // dim if last_sums else 0,
        early=fused and 2 * programs <= num_processors,
    )


def plan_for(query: Tensor, kv_cache: Tensor, rows: PagedRows) -> Launch:
    """The plan for query [T, Hq, D], or its parts, over kv_cache [2, num_blocks, PAGE, Hkv, D]."""
    num_tokens, num_heads, dim = query.shape[-3:]
    page, kv_heads = kv_cache.shape[2:4]
    return plan_launch(
        rows.seq_lens.shape[0],
        num_tokens,
        kv_heads,
        num_heads // kv_heads,
        dim,
        rows.max_query_len,
        rows.block_table.shape[1] * page,
        num_processors(query.device),
        kv_cache.element_size(),
    )
