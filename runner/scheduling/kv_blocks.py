"""Tracks which KV blocks each request holds, over all KV groups. Pure Python, no tensors.

It knows token counts and hashes, not scheduling: it says whether a request fits, never which other
request must make room. The tensors are in `batch.kv_cache`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ...configs.options import ConfigError
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_cache import BlockHashes
from .state_snapshots import RequestSnapshots, StateSnapshots

NEVER = sys.maxsize  # a token count that is never reached


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share a block table."""

    num_blocks: int  # including the null block
    block_size: int
    # A query at p sees keys up to p, from the first of the `sliding_window` positions that end with
    # the last of p's run of `window_step` positions; with a step of 1, p itself is the last.
    sliding_window: int | None = None
    # The group holds a drafter's KV, which at position p depends on the token at p + 1. A cached
    # block can therefore be reused only if the token after it is the same, too.
    needs_next_token: bool = False
    window_step: int = 1


@dataclass(slots=True)
class RequestBlocks:
    """One request's blocks. Entries that have left a sliding window are the null block."""

    tables: list[list[int]]  # [num_groups][blocks]
    num_published: list[int]  # [num_groups] leading blocks already in the prefix cache
    num_slid: list[int]  # [num_groups] leading blocks released because they left the window
    epoch: int  # the prefix cache's epoch at admission; see `KVBlocks.forget_contents`
    # Thresholds that `KVBlocks` maintains, so that a step can skip calls that would do nothing.
    capacity: int = 0  # `extend` to at most this many tokens does nothing
    slides_at: int = NEVER  # `slide` with fewer confirmed tokens does nothing
    publishes_at: int = NEVER  # `publish` with fewer confirmed tokens does nothing
    snapshots: RequestSnapshots | None = None  # None: the model has no recurrent states


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks found in the prefix cache, on which no reference is held yet."""

    num_tokens: int
    tables: list[list[int]]  # [num_groups][blocks]
    snapshot: int = NULL_BLOCK  # the block of the saved recurrent state
    # As long a prefix as KV blocks were found for: longer if no recurrent state was saved there.
    num_shared: int = 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class KVBlocks:
    """The block tables of all requests.

    `max_step_tokens` is the most tokens, the drafts' lookahead included, that one step can write
    beyond the confirmed ones. It determines how many blocks of a sliding-window group a request
    can need at once. Raises ConfigError if one request of `max_model_len` tokens does not fit.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        max_model_len: int,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
        snapshots: StateSnapshots | None = None,  # None: the model has no recurrent states
    ) -> None:
        self.groups = list(groups)
        self.snapshots = snapshots
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        self._sizes = [group.block_size for group in groups]
        self.max_model_len = max_model_len
        self._caching = enable_prefix_caching
        self._epoch = 0  # increases when `forget_contents` empties the cache
        self._step = lcm(*(group.block_size for group in groups))
        if snapshots is not None:
            self._step = lcm(self._step, snapshots.group.block_size)
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
        """Fraction of all blocks that requests hold, 0 .. 1."""
        total = sum(pool.num_usable for pool in self.pools)
        return 1.0 - sum(pool.num_free for pool in self.pools) / total

    # --- prefix cache ---------------------------------------------------------------------------

    def match(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix that leaves at least one of `num_tokens` tokens to
        compute."""
        if not self._caching:
            return self.no_match()
        limit = max(0, num_tokens - 1) // self._step * self._step
        found = self._lookup(hashes, limit)
        length, snapshot, shared = self._longest(found, limit, hashes)
        return PrefixMatch(length, self._cut(found, length), snapshot, shared)

    def no_match(self) -> PrefixMatch:
        """The match of a request that may not use the prefix cache: zero tokens."""
        return PrefixMatch(0, [[] for _ in self.groups])

    def _lookup(self, hashes: BlockHashes, limit: int) -> list[list[int | None]]:
        """For each group, the cached block or None for every full block below `limit`.

        Without a sliding window the list ends at the first miss.
        """
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

    def _longest(
        self, found: list[list[int | None]], limit: int, hashes: BlockHashes
    ) -> tuple[int, int, int]:
        """Length of the longest prefix up to `limit` for which every group has the blocks it
        needs, and of the longest one whose recurrent state is saved, too.

        Returns the latter, the block of its state, and the former.
        """
        usable = []
        for group, row in zip(self.groups, found, strict=True):
            limit = min(limit, len(row) * group.block_size)
            runs = [0]  # runs[i] = number of consecutive cached blocks that end before block i
            for block in row:
                runs.append(0 if block is None else runs[-1] + 1)
            usable.append(runs)
        shared = 0
        for length in range(limit // self._step * self._step, 0, -self._step):
            pairs = zip(self.groups, usable, strict=True)
            if all(self._window_cached(group, runs, length) for group, runs in pairs):
                shared = shared or length
                if self.snapshots is None:
                    return length, NULL_BLOCK, shared
                if (snapshot := self.snapshots.find(hashes, length)) is not None:
                    return length, snapshot, shared
        return 0, NULL_BLOCK, shared

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
        """True if `num_tokens` tokens of a new request, but at most `max_model_len`, fit next to
        the blocks held now."""
        num_tokens = min(num_tokens, self.max_model_len)
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table = match.tables[index]
            live = sum(block != NULL_BLOCK for block in table)
            shared = sum(pool.ref_count(b) > 0 for b in table if b != NULL_BLOCK)
            more = max(0, ceil_div(num_tokens, group.block_size) - len(table))
            if min(live + more, self._max_live[index]) - shared > pool.num_free:
                return False
        return True

    def num_free_blocks(self) -> list[int]:
        return [pool.num_free for pool in self.pools]

    def missing_blocks(self, num_tokens: int, blocks: RequestBlocks | None) -> list[int]:
        """The most blocks of each group that a request may still take to hold `num_tokens` tokens
        beside `blocks`, its present ones."""
        missing = []
        for index, (size, most) in enumerate(zip(self._sizes, self._max_live, strict=True)):
            table = [] if blocks is None else blocks.tables[index]
            more = ceil_div(min(num_tokens, self.max_model_len), size) - len(table)
            missing.append(max(0, min(more, most)))
        return missing

    def admit(self, match: PrefixMatch) -> RequestBlocks:
        """Take references on the matched blocks and return a new request's `RequestBlocks`."""
        for pool, table in zip(self.pools, match.tables, strict=True):
            pool.take(table)
        sizes = zip(self.groups, match.tables, strict=True)
        blocks = RequestBlocks(
            tables=[list(table) for table in match.tables],
            num_published=[len(table) for table in match.tables],
            num_slid=[min(first_block_in_window(g, match.num_tokens), len(t)) for g, t in sizes],
            epoch=self._epoch,
        )
        if self.snapshots is not None:
            blocks.snapshots = self.snapshots.admit(
                match.num_tokens, match.snapshot, match.num_shared
            )
        blocks.capacity = self._capacity(blocks)
        blocks.slides_at = self._slides_at(blocks)
        blocks.publishes_at = self._publishes_at(blocks)
        return blocks

    def _capacity(self, blocks: RequestBlocks) -> int:
        if len(self._sizes) == 1:  # most models have one group
            return len(blocks.tables[0]) * self._sizes[0]
        pairs = zip(blocks.tables, self._sizes, strict=True)
        return min([len(table) * size for table, size in pairs])

    def _slides_at(self, blocks: RequestBlocks) -> int:
        ends = [
            sees_nothing_before((num_slid + 1) * group.block_size, group)
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
        """Append blocks until `num_tokens` tokens fit; return the new block ids of each group.

        If there are too few free blocks, changes nothing and returns None.
        """
        new: list[list[int]] = []
        for size, pool, table in zip(self._sizes, self.pools, blocks.tables, strict=True):
            count = ceil_div(num_tokens, size) - len(table)
            if count <= 0:
                new.append([])
            elif count <= pool.num_free:
                new.append(pool.allocate(count))
            else:
                for index, ids in enumerate(new):  # undo the groups done so far
                    self.pools[index].release(ids)
                return None
        for table, ids in zip(blocks.tables, new, strict=True):
            table += ids
        blocks.capacity = self._capacity(blocks)
        return new

    def slide(self, blocks: RequestBlocks, num_confirmed: int) -> None:
        """Release the blocks that no query at or after position `num_confirmed` can see.

        Steps in flight start there or later, so the blocks that they read are kept.
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
        """Publish full blocks in the prefix cache, up to `num_confirmed` confirmed tokens.

        Their KV must have been written. For a group with `needs_next_token` the token at position
        `num_confirmed` must be known, too.
        """
        if not self._caching or blocks.epoch != self._epoch:
            blocks.publishes_at = NEVER
            return
        for index, size in enumerate(self._sizes):
            end = num_confirmed // size
            start = blocks.num_published[index]
            if end <= start:
                continue
            group = self.groups[index]
            chain = hashes.first(end, size, group.needs_next_token)
            table, pool = blocks.tables[index], self.pools[index]
            for position in range(start, end):
                block = table[position]
                if block != NULL_BLOCK and self._can_match(group, position):
                    pool.publish(block, chain[position])
            blocks.num_published[index] = end
        blocks.publishes_at = self._publishes_at(blocks)

    def _can_match(self, group: BlockGroup, position: int) -> bool:
        """Whether a prefix hit can need this block: hits end at multiples of `_step` tokens."""
        if group.sliding_window is None:
            return True
        hit = ceil_div((position + 1) * group.block_size, self._step) * self._step
        return position >= first_block_in_window(group, hit)

    def release(self, blocks: RequestBlocks) -> None:
        """Release all blocks of a request, the last ones first, so that they are evicted first."""
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            pool.release(reversed(table))
            table.clear()
        blocks.capacity = 0
        if self.snapshots is not None and blocks.snapshots is not None:
            self.snapshots.release(blocks.snapshots)

    def forget_contents(self) -> None:
        """Empty the prefix cache, held blocks included. Called when another drafter takes over.

        Requests keep the blocks that they hold but never publish them, because both drafters wrote
        KV into them.
        """
        self._epoch += 1
        for pool in self._all_pools():
            pool.forget_contents()

    def reset_prefix_cache(self) -> None:
        for pool in self._all_pools():
            pool.reset_cache()

    def _all_pools(self) -> list[BlockPool]:
        return self.pools if self.snapshots is None else [*self.pools, self.snapshots.pool]


def first_block_in_window(group: BlockGroup, num_computed: int) -> int:
    """Index of the first block that a query at position `num_computed` or later can see."""
    if group.sliding_window is None:
        return 0
    step = group.window_step
    return max(0, (num_computed // step + 1) * step - group.sliding_window) // group.block_size


def sees_nothing_before(position: int, group: BlockGroup) -> int:
    """The first query position from which on queries see no key before `position`."""
    assert group.sliding_window is not None
    step = group.window_step
    return ceil_div(position + group.sliding_window - step, step) * step
