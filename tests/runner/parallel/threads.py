"""The ranks of a group as threads of one process, with collectives in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from slipstream.runner.parallel.ranks import Ranks


class Meeting:
    """Where all ranks put a value down and take everyone's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        self._barrier.abort()


class ThreadCommunicator:
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self.num_collectives = 0
        self.gathered: list[tuple[int, ...]] = []  # the shapes of what was gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_collectives += 1
        return torch.stack(self._meeting.exchange(self._rank, x.clone())).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_collectives += 1
        self.gathered.append(tuple(x.shape))
        return torch.stack(self._meeting.exchange(self._rank, x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.num_collectives += 1
        total = torch.stack(self._meeting.exchange(self._rank, x.clone())).sum(0)
        return total.chunk(self._meeting.size)[self._rank].clone()

    def least(self, values: Sequence[int]) -> list[int]:
        tables = self._meeting.exchange(self._rank, list(values))
        return [min(column) for column in zip(*tables, strict=True)]

    def close(self) -> None:
        """Nothing was opened."""


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """The results of `work` on each rank."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return work(Ranks(rank, size, ThreadCommunicator(rank, meeting)))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [future.result() for future in futures]
