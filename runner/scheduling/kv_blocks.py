"""Which KV blocks each request holds, over all KV groups. Pure Python; tensors are in `kv_cache`.

Knows token counts and hashes, not scheduling: it says whether there is room, never who must go.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ...configs.options import ConfigError
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_cache import BlockHashes

NEVER = sys.maxsize  # more tokens than there will ever be


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share a block table."""

    num_blocks: int  # null block included
    block_size: int
    sliding_window: int | None = None  # a query at p sees keys p - window + 1 .. p
    # Holds KV of a drafter, which at p depends on the token at p + 1: a block can be used again
    # only where the token after it is the same, too.
    needs_next_token: bool = False


@dataclass(slots=True)
class RequestBlocks:
    """One request's blocks. Entries out of a sliding window are the null block."""

    tables: list[list[int]]  # [num_groups][blocks]
    num_published: list[int]  # [num_groups] leading blocks offered to the prefix cache
    num_slid: list[int]  # [num_groups] leading blocks given back, out of the window
    epoch: int  # of the prefix cache when the request was admitted; see `forget_contents`
    # So that a step asks only for what changes something; `KVBlocks` keeps them.
    capacity: int = 0  # tokens that fit; `extend` to no more does nothing
    slides_at: int = NEVER  # `slide` to fewer confirmed tokens does nothing
    publishes_at: int = NEVER  # `publish` of fewer confirmed tokens does nothing


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks found in the prefix cache; not yet held."""

    num_tokens: int
    tables: list[list[int]]  # [num_groups][blocks]


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class KVBlocks:
    """The block tables of all requests.

    `max_step_tokens` bounds how far one step can write past what is confirmed (drafts' lookahead
    included); with it a sliding-window group knows how many blocks one request can need at once.
    Raises ValueError if one request of `max_model_len` tokens does not fit.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        max_model_len: int,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        self._sizes = [group.block_size for group in groups]
        self.max_model_len = max_model_len
        self._caching = enable_prefix_caching
        self._epoch = 0  # grows when all contents so far are forgotten
        self._step = lcm(*(group.block_size for group in groups))
        self._max_live = [self._live_bound(group, max_step_tokens) for group in groups]
        for group, pool, need in zip(self.groups, self.pools, self._max_live, strict=True):
            if need > pool.num_usable:
                raise ConfigError(
                    f"The KV cache has {pool.num_usable} blocks of {group.block_size} tokens, but "
                    f"one request of max_model_len {max_model_len} needs {need}: lower "
                    "--max-model-len or give the cache more memory."
                )

    def _live_bound(self, group: BlockGroup, max_step_tokens: int) -> int:
        whole = ceil_div(self.max_model_len, group.block_size)
        if group.sliding_window is None:
            return whole
        span = group.sliding_window - 1 + max_step_tokens
        return min(whole, ceil_div(span, group.block_size) + 1)

    @property
    def usage(self) -> float:
        """Share of all blocks that requests hold, 0 .. 1."""
        total = sum(pool.num_usable for pool in self.pools)
        return 1.0 - sum(pool.num_free for pool in self.pools) / total

    # --- prefix cache ---------------------------------------------------------------------------

    def match(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        """The longest cached prefix that leaves at least one of `num_tokens` tokens to compute."""
        if not self._caching:
            return self.no_match()
        limit = max(0, num_tokens - 1) // self._step * self._step
        found = self._lookup(hashes, limit)
        length = self._longest(found, limit)
        return PrefixMatch(length, self._cut(found, length))

    def no_match(self) -> PrefixMatch:
        """What a request that may not use the cache starts from."""
        return PrefixMatch(0, [[] for _ in self.groups])

    def _lookup(self, hashes: BlockHashes, limit: int) -> list[list[int | None]]:
        """Per group the cached block of each full block; full attention stops at the first miss."""
        found: list[list[int | None]] = []
        for group, pool in zip(self.groups, self.pools, strict=True):
            count = limit // group.block_size
            row: list[int | None] = []
            chain = hashes.first(count, group.block_size, group.needs_next_token)
            for block_hash in chain[:count]:
                block = pool.lookup(block_hash)
                if block is None and group.sliding_window is None:
                    break
                row.append(block)
            found.append(row)
        return found

    def _longest(self, found: list[list[int | None]], limit: int) -> int:
        """The longest prefix within `limit` whose needed blocks are cached in every group."""
        usable = []
        for group, row in zip(self.groups, found, strict=True):
            limit = min(limit, len(row) * group.block_size)
            runs = [0]  # runs[i] = cached blocks in a row that end before block i
            for block in row:
                runs.append(0 if block is None else runs[-1] + 1)
            usable.append(runs)
        for length in range(limit // self._step * self._step, 0, -self._step):
            pairs = zip(self.groups, usable, strict=True)
            if all(self._window_cached(group, runs, length) for group, runs in pairs):
                return length
        return 0

    @staticmethod
    def _window_cached(group: BlockGroup, runs: list[int], length: int) -> bool:
        end = length // group.block_size
        return runs[end] >= end - first_block_in_window(group, length)

    def _cut(self, found: list[list[int | None]], length: int) -> list[list[int]]:
        tables = []
        for group, row in zip(self.groups, found, strict=True):
            first = first_block_in_window(group, length)
            end = length // group.block_size
            live = [block for block in row[first:end] if block is not None]
            assert len(live) == end - min(first, end)
            tables.append([NULL_BLOCK] * min(first, end) + live)
        return tables

    # --- one request ----------------------------------------------------------------------------

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens of a new request fit beside what others hold now."""
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table = match.tables[index]
            live = sum(block != NULL_BLOCK for block in table)
            shared = sum(pool.ref_count(b) > 0 for b in table if b != NULL_BLOCK)
            more = max(0, ceil_div(num_tokens, group.block_size) - len(table))
            if min(live + more, self._max_live[index]) - shared > pool.num_free:
                return False
        return True

    def admit(self, match: PrefixMatch) -> RequestBlocks:
        """Hold the matched blocks for a new request."""
        for pool, table in zip(self.pools, match.tables, strict=True):
            pool.take(table)
        sizes = zip(self.groups, match.tables, strict=True)
        blocks = RequestBlocks(
            tables=[list(table) for table in match.tables],
            num_published=[len(table) for table in match.tables],
            num_slid=[min(first_block_in_window(g, match.num_tokens), len(t)) for g, t in sizes],
            epoch=self._epoch,
        )
        blocks.capacity = self._capacity(blocks)
        blocks.slides_at = self._slides_at(blocks)
        blocks.publishes_at = self._publishes_at(blocks)
        return blocks

    def _capacity(self, blocks: RequestBlocks) -> int:
        if len(self._sizes) == 1:  # as of most models
            return len(blocks.tables[0]) * self._sizes[0]
        pairs = zip(blocks.tables, self._sizes, strict=True)
        return min([len(table) * size for table, size in pairs])

    def _slides_at(self, blocks: RequestBlocks) -> int:
        ends = [
            (num_slid + 1) * group.block_size + group.sliding_window - 1
            for group, num_slid in zip(self.groups, blocks.num_slid, strict=True)
            if group.sliding_window is not None
        ]
        return min(ends, default=NEVER)

    def _publishes_at(self, blocks: RequestBlocks) -> int:
        if not self._caching or blocks.epoch != self._epoch:
            return NEVER
        if len(self._sizes) == 1:
            return (blocks.num_published[0] + 1) * self._sizes[0]
        pairs = zip(blocks.num_published, self._sizes, strict=True)
        return min([(count + 1) * size for count, size in pairs])

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> list[list[int]] | None:
        """Append blocks until `num_tokens` tokens fit: the new ids by group, or None, unchanged."""
        new: list[list[int]] = []
        for size, pool, table in zip(self._sizes, self.pools, blocks.tables, strict=True):
            count = ceil_div(num_tokens, size) - len(table)
            if count <= 0:
                new.append([])
            elif count <= pool.num_free:
                new.append(pool.allocate(count))
            else:
                for index, ids in enumerate(new):  # undo the groups before this one
                    self.pools[index].release(ids)
                return None
        for table, ids in zip(blocks.tables, new, strict=True):
            table += ids
        blocks.capacity = self._capacity(blocks)
        return new

    def slide(self, blocks: RequestBlocks, num_confirmed: int) -> None:
        """Give back blocks that no query at or after position `num_confirmed` can see.

        Steps in flight start there or later, so what they read stays.
        """
        for index, group in enumerate(self.groups):
            if group.sliding_window is None:
                continue
            table = blocks.tables[index]
            first = min(first_block_in_window(group, num_confirmed), len(table))
            for position in range(blocks.num_slid[index], first):
                self.pools[index].release((table[position],))
                table[position] = NULL_BLOCK
            blocks.num_slid[index] = max(blocks.num_slid[index], first)
        blocks.slides_at = self._slides_at(blocks)

    def publish(self, blocks: RequestBlocks, hashes: BlockHashes, num_confirmed: int) -> None:
        """Let full blocks below `num_confirmed` (tokens confirmed, KV written) be found.

        The token at `num_confirmed` must be known where a group needs it.
        """
        if not self._caching or blocks.epoch != self._epoch:
            blocks.publishes_at = NEVER
            return
        for index, size in enumerate(self._sizes):
            end = num_confirmed // size
            start = blocks.num_published[index]
            if end <= start:
                continue
            chain = hashes.first(end, size, self.groups[index].needs_next_token)
            table, pool = blocks.tables[index], self.pools[index]
            for position in range(start, end):
                block = table[position]
                if block != NULL_BLOCK:
                    pool.publish(block, chain[position])
            blocks.num_published[index] = end
        blocks.publishes_at = self._publishes_at(blocks)

    def release(self, blocks: RequestBlocks) -> None:
        """Give back everything a request holds, its last blocks first (they are evicted first)."""
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(reversed(table))
            table.clear()
        blocks.capacity = 0

    def forget_contents(self) -> None:
        """Forget every cached block, held ones too, because another drafter would write other KV.

        Requests that hold blocks now keep them, but never publish any: both drafters wrote to them.
        """
        self._epoch += 1
        for pool in self.pools:
            pool.forget_contents()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        for pool in self.pools:
            pool.reset_cache()


def first_block_in_window(group: BlockGroup, num_computed: int) -> int:
    """Index of the first block that a query at position `num_computed` or later can see."""
    if group.sliding_window is None:
        return 0
    return max(0, num_computed - group.sliding_window + 1) // group.block_size
