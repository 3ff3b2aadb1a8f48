"""The ranks that share one model: which part of each matrix a rank holds, and sums over ranks.

A rank is a process with a device of its own. All ranks run the same passes of the same size, since
passes contain collectives. A model on one rank knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from ..errors import ModelLoadError, RunnerError
from .packet_sums import PacketSums


class CannotDivide(ModelLoadError):
    """A size of a model is no multiple of the number of ranks."""


class Communicator(Protocol):
    """The collectives of a group. Every rank must call the same ones in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x, contiguous, over the ranks, the same bits on each. It may overwrite x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The x of every rank in order of ranks: [...] -> [size, ...]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over ranks of this one's part: [size * n, ...] -> [n, ...]."""

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        """Send each rank its block of x, in order of ranks: [S, ...] -> [T, ...], also in order.

        `sent` and `received` are the rows of the blocks, on the host; None: equal blocks.
        """

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over the ranks. It waits for the device; start-up only."""

    def close(self) -> None:
        """Leave the group, after the last collective."""


@dataclass(frozen=True)
class Cut:
    """The part `start` to `stop` of a tensor's dimension `dim`, and after it those of `more`."""

    dim: int
    start: int
    stop: int
    more: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of each part."""
        return ((self.start, self.stop), *self.more)

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor: a view, unless it has several parts."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this part of a tensor of this shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


def stacked(sections: Sequence[tuple[int, Cut]], dim: int = 0) -> Cut:
    """The part of a tensor whose dimension `dim` is several sections: of each, its size and the
    part of it."""
    spans, begin = [], 0
    for size, cut in sections:
        spans += [(begin + start, begin + stop) for start, stop in cut.spans]
        begin += size
    (start, stop), *more = spans
    return Cut(dim, start, stop, tuple(more))


class Silent:
    """A communicator without other ranks, for models of meta tensors: it changes only shapes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self._size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // self._size, *x.shape[1:])

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        return torch.empty_like(x)

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def close(self) -> None:
        """Do nothing: nobody was joined."""


@dataclass(frozen=True)
class Ranks:
    """The group that shares a model, as one of its ranks sees it."""

    rank: int
    size: int
    communicator: Communicator
    by_expert: bool = False  # a rank has whole experts, not a part of each
    packets: PacketSums | None = None  # for few rows, if the GPUs can exchange packets

    def share(self, total: int, what: str, groups: int | None = None, dim: int = 0) -> Cut:
        """The part of `total` rows or columns that this rank holds.

        The rows are `groups` indivisible groups of equal size, by default as many as rows. With
        fewer groups than ranks, several ranks hold the same group. Raises CannotDivide, which names
        `what` is divided, if the groups cannot be divided evenly.
        """
        count = total if groups is None else groups
        if count % self.size == 0:
            each = total // self.size
            return Cut(dim, self.rank * each, (self.rank + 1) * each)
        if groups is not None and self.size % count == 0:
            each, group = total // count, self.rank // (self.size // count)
            return Cut(dim, group * each, (group + 1) * each)
        raise CannotDivide(
            f"the model's {count} {what} cannot be divided among --tensor-parallel-size "
            f"{self.size} ranks; use a size that divides {count}."
        )

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, which it may overwrite."""
        return self.communicator.all_reduce(x.contiguous())

    def adds(self, num_rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether `sum_parts` can add up rows [num_rows, width]."""
        return self.packets is not None and self.packets.fit(num_rows, width, dtype)

    def sum_parts(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """residual + the sum over ranks of x, [M, H] or its parts [S, M, H], in one kernel."""
        assert self.packets is not None
        return self.packets.sum(x, dtype, residual)

    def gather(self, x: Tensor) -> Tensor:
        """The x of every rank in order of ranks: [...] -> [size, ...]."""
        x = x.contiguous()
        if self.packets is not None and self.packets.gathers(x):
            return self.packets.gather(x)
        return self.communicator.all_gather(x)

    def side_by_side(self, x: Tensor, total: int) -> Tensor:
        """Every rank's x [M, n] side by side, of which the first `total` columns count."""
        parts = self.gather(x)  # [size, M, n]
        whole = parts.transpose(0, 1).reshape(x.shape[0], -1)
        return whole if whole.shape[1] == total else whole[:, :total].contiguous()

    def least(self, values: Sequence[int]) -> list[int]:
        return self.communicator.least(values)


def least_of(ranks: Ranks | None, value: int) -> int:
    return value if ranks is None else ranks.least([value])[0]


class HasLeast(Protocol):
    @property
    def rank(self) -> int: ...

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over the members."""


def check_equal(ranks: HasLeast | None, what: str, value: object) -> None:
    """Raise RunnerError unless `value`, by its repr, is the same on all ranks."""
    if ranks is None:
        return
    number = crc32(repr(value).encode())
    least, most = ranks.least([number, -number])
    if least != -most:
        raise RunnerError(
            f"the ranks differ in {what}; rank {ranks.rank} has {value}. It must be the same on "
            "all: start every node with the same flags and versions."
        )


def head_counts(ranks: Ranks | None, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """The query heads and KV heads of a rank. Ranks share KV heads if there are fewer of them."""
    if ranks is None:
        return num_heads, num_kv_heads
    queries = ranks.share(num_heads, "attention heads")
    return queries.size, ranks.share(num_kv_heads, "KV heads", num_kv_heads).size
