"""Lists of numbers on the device, one per slot, each as long as its request needs.

A client chooses the length of its list. The lists are therefore stored back to back in one array
that is sized by their total length, so that one long list does not cost every slot memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .host_copy import StagingPool

_MIN_CAPACITY = 256  # entries


class RaggedRows:
    """R lists of entries. An entry has C numbers, one per column. All lists start empty."""

    def __init__(self, max_num_reqs: int, num_columns: int, device: torch.device) -> None:
        self._device = device
        self._pool = StagingPool(device)
        self._columns = num_columns
        # [2, R] slot -> start and length of its list, on the host and on the device
        self._bounds_cpu = np.zeros((2, max_num_reqs), dtype=np.int64)
        self._bounds = torch.zeros(2, max_num_reqs, dtype=torch.int64, device=device)
        self.start, self.length = self._bounds  # [R] int64 each
        self.entries = self._empty(_MIN_CAPACITY)  # [C, capacity] int32
        self._end = 0  # entries from here on are free
        self._num_live = 0

    @property
    def is_empty(self) -> bool:
        """True if all lists are empty."""
        return self._num_live == 0

    @property
    def max_length(self) -> int:
        """Length of the longest list. Does not wait for the device."""
        return int(self._bounds_cpu[1].max())

    def set(self, slot: int, columns: np.ndarray) -> None:
        """Replace a slot's list by `columns`, [C, length] int32. Never waits for the device."""
        self.clear(slot)
        length = columns.shape[1]
        if not length:
            return
        if self._end + length > self.entries.shape[1]:
            self._move(self._num_live + length)
        start, self._end = self._end, self._end + length
        self._num_live += length
        self._bounds_cpu[:, slot] = start, length
        self.entries[:, start : self._end] = self._pool.upload(np.ascontiguousarray(columns))
        self._bounds[:, slot] = self._pool.upload(self._bounds_cpu[:, slot].copy())

    def clear(self, slot: int) -> None:
        """Empty a slot's list. The array shrinks once less than an eighth of it is in use."""
        length = int(self._bounds_cpu[1, slot])
        if not length:
            return
        self._num_live -= length
        self._bounds_cpu[:, slot] = 0
        self._bounds[:, slot].zero_()
        if self.entries.shape[1] > max(_MIN_CAPACITY, 8 * self._num_live):
            self._move(self._num_live)

    def longest(self, slots: Iterable[int]) -> int:
        """Length of the longest list of these slots, at least 1. Does not wait for the device."""
        return max((int(self._bounds_cpu[1, slot]) for slot in slots), default=1) or 1

    def padded(self, slots: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` entries of each slot's list; `slots` is [P] int64 and may repeat.

        Returns the entries [C, P, width] int32, and a mask [P, width] bool of those that exist. The
        others hold -1.
        """
        offsets = torch.arange(width, device=slots.device)
        exists = offsets < self.length[slots][:, None]
        at = torch.where(exists, self.start[slots][:, None] + offsets, 0)
        return torch.where(exists, self.entries[:, at], -1), exists

    def _empty(self, capacity: int) -> Tensor:
        return torch.full((self._columns, capacity), -1, dtype=torch.int32, device=self._device)

    def _move(self, num_entries: int) -> None:
        """Move all lists into a new array with room for at least twice `num_entries`."""
        capacity = max(_MIN_CAPACITY, 1 << (2 * num_entries).bit_length())
        old, self.entries = self.entries, self._empty(capacity)
        slots = np.flatnonzero(self._bounds_cpu[1])
        starts, lengths = self._bounds_cpu[:, slots]
        self._end = int(lengths.sum())
        if self._end:
            indices = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
            index = self._pool.upload(np.concatenate(indices))
            self.entries[:, : self._end] = old[:, index]
        self._bounds_cpu[0, slots] = lengths.cumsum() - lengths
        self._bounds.copy_(self._pool.upload(self._bounds_cpu.copy()))
