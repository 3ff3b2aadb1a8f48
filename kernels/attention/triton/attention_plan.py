"""Chooses tile sizes and the number of KV splits for a launch of an attention kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import triton
from torch import Tensor

from ...device import card_of, num_processors
from ..paged_rows import AttentionRule, PagedRows

MAX_SPLITS = 16
_MOST_PREFILL_SPLITS = 8
FUSED_QUERY_LEN = 16  # the fused kernel takes at most this number of new tokens per request
_MOST_SUMMED = 16  # rows of the fused kernel, whose heads have up to 128 values
_LAST_SUMS_VALUES = 2048  # the last program sums the splits if one split has at most these values
# Measured on an H200 with `tests/lab/measure_chain.py attention`.
_PER_PROCESSOR = 2  # programs per multiprocessor, which hide each other's latency
_FEW = 16  # with fewer programs of large heads, all splits work and a second kernel sums them
_LEAST_KEYS = 128  # with more programs, a split is worthwhile from this number of keys on
_ALONE = 16384  # up to this number of key values (keys x head size), one split does all the work
_KEYS_OF_A_SPLIT = 128  # splits have at least this number of keys of the longest context
_HOPPER_PREFILL = "1"  # where the environment does not say
_HOPPER_TILE_ROWS = 128
# Measured on an H200 with `tests/lab/measure_ragged.py`, for heads of 128 values.
_LONG = 512  # longer contexts are split even if all programs together fill the GPU
_LEAST_VALUES = 512  # of a split; more are not worth it if programs fill the GPU many times


@dataclass(frozen=True)
class Launch:
    """The tiles and splits of one launch; a function of shapes only, so a graph may bake them."""

    block_m: int  # query rows of a program, tokens times heads
    block_q: int  # query tokens of a program
    heads: int  # query heads of a program
    block_n: int  # keys of a tile
    splits: int  # programs that share the keys of a request
    one_block: bool  # each request's queries fit into one program
    num_warps: int
    num_stages: int
    heads_first: bool = False  # consecutive programs have the heads of one request
    fused: bool = False  # the kernel also rotates and writes the KV
    # The rest is for the fused kernel.
    last_sums: int = 0  # rows for which the last program sums the splits; 0 = a second kernel does
    least_keys: int = 1  # keys of a split with work; the kernel itself finds how many have work
    alone: int = 0  # up to this number of keys only one split has work
    registers: int | None = None  # limit per thread
    rows: int = 0  # the rows of block_m that are used; a power of two
    early: bool = False  # prefetch the first keys into L2 before the inputs are ready
    only_long: bool = False  # splits are for long contexts; a kernel that splits all has none


def _tile_sizes(rows: int, dim: int, element_size: int) -> tuple[int, int, int]:
    """(query rows of a tile, keys of a tile, stages), before the number of programs is known."""
    largest = 128 if dim <= 128 else 64 if dim <= 256 else 32
    if dim > 512:  # MLA, where many heads share one KV row
        largest = 64
    block_n, stages = (64, 3) if dim <= 128 else (32, 2)
    if element_size > 2:  # keep the size of a tile in bytes
        largest, block_n, stages = largest // 2, block_n // 2, 2
    return max(16, min(largest, triton.next_power_of_2(rows))), block_n, stages


def _decode_tiles(programs: int, num_processors: int, dim: int) -> tuple[int, int, int, int | None]:
    """(keys of a tile, stages, warps, register limit) for tiles of 16 query rows.

    A few programs use wide tiles, to have many keys in flight. Many programs of small heads have
    one warp, which never waits for another. Large heads keep four: a program with one warp reads so
    slowly that a long context ends long after all others (`tests/lab/measure_ragged.py`).
    """
    if dim <= 64 and programs > 5 * num_processors:
        return 32, 3, 1, None
    if dim > 64 and programs > num_processors:
        return 64, 2, 4, 128 if dim == 128 else None
    if dim > 64 and programs < _FEW:
        return 64, 2, 4, None
    return 128, 2, 4, None


def num_splits(
    programs: int, max_keys: int, processors: int, least_keys: int = _KEYS_OF_A_SPLIT
) -> int:
    """The largest power of two, up to MAX_SPLITS, with few enough programs for the processors and
    at least `least_keys` keys of the longest context in a split."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and programs * splits * 2 <= _PER_PROCESSOR * processors
        and max_keys >= least_keys * splits * 2
    ):
        splits *= 2
    return splits


def hopper_prefill_wanted(query: Tensor) -> bool:
    """Whether long queries [T, Hq, D] should use the kernel for Hopper GPUs if it fits.

    It does if there are tiles for all multiprocessors, unless SLIPSTREAM_HOPPER_PREFILL=0.
    """
    card = card_of(query.device)
    if card is None or card.capability[0] != 9:
        return False
    wanted = os.environ.get("SLIPSTREAM_HOPPER_PREFILL", _HOPPER_PREFILL) == "1"
    tiles = query.shape[0] * query.shape[1] // _HOPPER_TILE_ROWS
    return wanted and tiles >= card.num_processors


def prefill_splits(programs: int, most: int, processors: int) -> int:
    """The programs that may share the keys of a query block if `programs` have work: at most `most`
    and a power of two, so that there are few kinds of launches."""
    splits = 1
    while 2 * splits <= min(_MOST_PREFILL_SPLITS, most) and splits * programs <= processors:
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
    """Choose tile sizes and the number of KV splits for a launch with these shapes.

    Each variant of the main kernel is chosen for a range of programs that at least doubles, so
    `dry_start` compiles all variants by trying powers of two of requests.
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
    splits = num_splits(programs, max_keys, num_processors)
    own = triton.next_power_of_2(rows)
    values = own * triton.next_power_of_2(dim)
    least_keys, alone = _LEAST_KEYS, _ALONE // dim
    only_long = registers is not None and splits == 1 and max_keys > _LONG
    if only_long:
        # Programs fill the GPU, but the one with the longest context would end last.
        splits = 4 if programs <= 6 * num_processors else 2 if values <= _LEAST_VALUES else 1
        least_keys, alone = _LONG // 2, _LONG
    can_sum = fused and splits > 1 and values <= _LAST_SUMS_VALUES
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
        least_keys=least_keys if last_sums else 1,
        alone=alone if last_sums else 0,
        early=fused and 2 * programs <= num_processors,
        only_long=only_long,
    )


def summed_inside(plan: Launch) -> Launch:
    """The plan with the splits summed by the last program, if a second kernel would."""
    needed = plan.splits > 1 and not plan.last_sums and plan.rows <= _MOST_SUMMED
    return replace(plan, last_sums=plan.rows) if needed else plan


def plan_for(query: Tensor, kv_cache: Tensor, rows: PagedRows, rule: AttentionRule) -> Launch:
    """The plan for query [T, Hq, D], or its parts [S, T, Hq, D], over kv_cache
    [2, num_blocks, PAGE, Hkv, D]. Keys of e4m3 are widened, so their tiles are those of queries."""
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
        rule.dtype_of(kv_cache).itemsize,
    )
