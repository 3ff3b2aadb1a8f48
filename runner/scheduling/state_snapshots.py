"""Saved recurrent states: which prefixes have one, and which steps save the next. Pure Python.

A model with recurrent layers can continue a cached prefix only from a saved state of exactly that
length. States are saved at *borders*, the multiples of a block size, into blocks of a pool. A saved
state is nothing but cache: if no block is free, none is saved, and no request ever waits for one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .block_pool import BlockPool
from .prefix_cache import BlockHashes


@dataclass(frozen=True)
class StateGroup:
    num_blocks: int  # including the null block
    block_size: int  # tokens between borders
    # The states absorb a row of more tokens at once, and others when the next row begins; see
    # `kernels.recurrent.rows`.
    log: int


@dataclass(slots=True)
class Saving:
    """A state that a step in flight, or a later one, saves."""

    border: int
    block: int
    is_logged: bool  # a later step may save it, so that the device must keep its place until then


@dataclass(slots=True)
class RequestSnapshots:
    """One request's states that are being saved."""

    next_border: int  # the first border that no row has been asked about
    # The border up to which another request had the same tokens, or 0. What two requests share, a
    # third may, so the state there is saved, too.
    branch: int = 0
    savings: list[Saving] = field(default_factory=list)


class StateSnapshots:
    """The pool of saved states."""

    def __init__(self, group: StateGroup, cuts_chunks: bool = True) -> None:
        self.group = group
        self._cuts_chunks = cuts_chunks  # False: a prompt is one row
        self.pool = BlockPool(group.num_blocks)

    def find(self, hashes: BlockHashes, length: int) -> int | None:
        """The block with the state after the first `length` tokens, or None."""
        size = self.group.block_size
        if length == 0 or length % size or length > hashes.num_tokens:
            return None
        return self.pool.lookup(hashes.first(length // size, size)[length // size - 1])

    def admit(self, length: int, block: int, num_shared: int = 0) -> RequestSnapshots:
        """Begin a request that continues from `block`, which becomes the most recently used.

        It has its first `num_shared` tokens in common with an earlier request.
        The block is copied before anything that is scheduled later can overwrite it, so the request
        does not hold it.
        """
        self.pool.take((block,))
        self.pool.release((block,))
        size = self.group.block_size
        return RequestSnapshots((length // size + 1) * size, num_shared // size * size)

    def shorten(
        self, request: RequestSnapshots, hashes: BlockHashes, start: int, count: int
    ) -> int:
        """How many of the `count` tokens from `start` on a prompt's row should have, so that it
        ends at its branch or at the last border, unless the state there is saved already."""
        size = self.group.block_size
        border = (start + count) // size * size
        if start < request.branch < border and self.find(hashes, request.branch) is None:
            border = request.branch
        if border - start <= self.group.log or border == start + count:
            return count
        if not self._cuts_chunks or not self.pool.num_usable:
            return count
        return count if self.find(hashes, border) is not None else border - start

    def plan(
        self, request: RequestSnapshots, hashes: BlockHashes, start: int, count: int
    ) -> Saving | None:
        """The state to save in or after a row of `count` tokens; None if there is none.

        `start` is the row's first position; of a row that may follow rejected drafts, an upper
        bound. Call it for every row, in order.
        """
        end, size = start + count, self.group.block_size
        if end < request.next_border:
            return None
        border = end // size * size
        request.next_border = border + size
        is_logged = count <= self.group.log
        # The device keeps the place of one saving for each slot.
        if any(saving.is_logged for saving in request.savings) or not self.pool.num_free:
            return None
        if not is_logged and (border < end or self.find(hashes, border) is not None):
            return None
        saving = Saving(border, self.pool.allocate(1)[0], is_logged)
        request.savings.append(saving)
        return saving

    def land(self, request: RequestSnapshots, hashes: BlockHashes, start: int, count: int) -> None:
        """Publish what has been saved, when a row of `count` tokens from exactly `start` landed."""
        if not request.savings:
            return
        absorbed = start + count if count > self.group.log else start
        size, left = self.group.block_size, []
        for saving in request.savings:
            if saving.border > absorbed:
                left.append(saving)
                continue
            block_hash = hashes.first(saving.border // size, size)[saving.border // size - 1]
            self.pool.publish(saving.block, block_hash)
            self.pool.release((saving.block,))
        request.savings = left

    def release(self, request: RequestSnapshots) -> None:
        """Give back the blocks of a request that leaves its slot.

        Steps in flight may still write to them, but before any later step does.
        """
        self.pool.release(saving.block for saving in request.savings)
        request.savings.clear()
