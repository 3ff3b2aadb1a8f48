"""Tracks the KV blocks of one group: the free list, reference counts and cached contents.

Block 0 is the null block. It is never given out; tables hold it where nothing may be read. The
pool knows nothing about requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks - 1. A block is referenced or free; a free block may still be cached.

    Free blocks without contents are given out first, then cached ones in LRU order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Number of blocks in the pool, without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._empty) + len(self._cached_free)

    def ref_count(self, block: int) -> int:
        """Number of block tables that hold the block."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Give out `count` blocks with one reference each. The caller checks `num_free` first."""
        assert count <= self.num_free, "the caller must check num_free"
        empty, ref_counts, blocks = self._empty, self._ref_counts, []
        for _ in range(count):
            if empty:
                block = empty.pop()
            else:
                block, _ = self._cached_free.popitem(last=False)
                self._forget(block)
            ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block. Null blocks are skipped."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._ref_counts[block] == 0:
                del self._cached_free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block. Null blocks are skipped.

        Cached blocks are evicted in the order in which they were released.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._ref_counts[block] > 0, f"block {block} is released twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._hashes[block] is None:
                self._empty.append(block)
            else:
                self._cached_free[block] = None

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with these contents, or None."""
        return self._by_hash.get(block_hash)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let `lookup` find a held block.

        If another block already has these contents, do nothing.
        """
        assert self._ref_counts[block] > 0 and self._hashes[block] in (None, block_hash)
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def reset_cache(self) -> None:
        """Forget the contents of every block that no request holds."""
        for block in self._cached_free:
            self._forget(block)
            self._empty.append(block)
        self._cached_free.clear()

    def forget_contents(self) -> None:
        """Forget the contents of every block. Requests keep the blocks that they hold."""
        self.reset_cache()
        for block in list(self._by_hash.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None
