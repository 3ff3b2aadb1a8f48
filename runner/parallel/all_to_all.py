"""Rows that go to single ranks: a row to each rank that has one of its experts, and sums back.

The rows for a rank are sent one after the other, so their numbers must be known to the host. Steps
without CUDA graphs can therefore do this, and graphs cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .ranks import Communicator


@dataclass(frozen=True)
class Transfer:
    """The rows that this rank sends to each rank and gets from each."""

    rows: Tensor  # [S] int64: the rows for the first rank ascending, then those for the second
    sent: list[int]  # [size] rows for each rank, S in all
    received: list[int]  # [size] rows from each rank, T in all
    communicator: Communicator

    @property
    def num_received(self) -> int:
        """T."""
        return sum(self.received)

    def send(self, x: Tensor) -> Tensor:
        """The rows from all ranks, in order of ranks: bytes [M, n] -> [T, n]."""
        by_word = x.view(torch.int32) if x.shape[1] % 4 == 0 else x  # fewer numbers to copy
        own = by_word[self.rows].view(x.dtype)
        return self.communicator.all_to_all(own, self.received, self.sent)

    def sum_back(self, parts: Tensor, num_rows: int) -> Tensor:
        """Return what was computed for the received rows, and add up what the ranks return for
        each own row, in order of ranks and in float32: [T, n] -> [M, n]; M is `num_rows`."""
        back = self.communicator.all_to_all(parts.contiguous(), self.sent, self.received)
        out = torch.zeros(num_rows, *parts.shape[1:], dtype=torch.float32, device=parts.device)
        pieces = (torch.split(self.rows, self.sent), torch.split(back, self.sent))
        for rows, part in zip(*pieces, strict=True):  # within a piece, all rows are different
            if rows.shape[0]:
                out.index_add_(0, rows, part.float())
        return out.to(parts.dtype)


def plan_transfer(owners: Tensor, size: int, communicator: Communicator) -> Transfer:
    """Find the rows for each of `size` ranks, and ask how many rows come from each.

    owners: [M, k], the rank of each row's experts, or -1. A row goes to a rank once, whatever the
    number of its experts there. Waits for the device.
    """
    count = owners.shape[0]
    wanted = torch.zeros(count, size + 1, dtype=torch.bool, device=owners.device)
    wanted.scatter_(1, owners.long() + 1, True)
    by_rank = wanted[:, 1:].t().contiguous()  # [size, M]
    sent = by_rank.sum(1)
    table = torch.stack((sent, communicator.all_to_all(sent))).tolist()
    # A sort needs no second wait, which a search for what is not zero would.
    order = by_rank.flatten().to(torch.uint8).argsort(descending=True, stable=True)
    rows = order[: sum(table[0])] % max(count, 1)
    return Transfer(rows, table[0], table[1], communicator)
