"""Experts that the engines of `-dp` share: which of them a rank holds, and the exchange of rows.

A layer gathers the rows of all engines, computes what its own experts contribute to each, and every
engine gets the sums of its rows back. All ranks must therefore run the same passes of equal sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ModelLoadError
from .ranks import Cut

_ALL_ROWS = (1 << 31) - 1  # outside steps, every row of a pass counts


class RowCommunicator(Protocol):
    """The collectives of the exchange, over the engines."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The x of every engine in order: [...] -> [size, ...]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over engines of this one's part: [size * n, ...] -> [n, ...]."""


class RowExchange:
    """Brings the rows of all engines to each of them, and the sums of its own rows back.

    The rows of a step's first passes are tokens, those of its draft decodes are requests.
    """

    def __init__(self, communicator: RowCommunicator, size: int, device: torch.device) -> None:
        """`size` is the number of engines."""
        self.size = size
        self._communicator = communicator
        # Real rows of each engine, in passes over tokens and in draft decodes. Graphs read them.
        self._counts = torch.full((2, size), _ALL_ROWS, dtype=torch.int32, device=device)
        self._rows = [0, 0]  # the most rows, padding included, of any engine
        self._phase = 0

    def begin_step(self, num_tokens: int, num_reqs: int, counts: Tensor) -> None:
        """Prepare for the passes of a step.

        `num_tokens` and `num_reqs` are the most rows, padding included, that any engine's passes
        have. `counts` [2, size] int32 are the real rows of each engine, tokens and then requests.
        """
        self._counts.copy_(counts, non_blocking=True)
        self._rows, self._phase = [num_tokens, num_reqs], 0

    def begin_decodes(self, are_next: bool = True) -> None:
        """Declare the next passes draft decodes, or else passes over tokens."""
        self._phase = int(are_next)

    @property
    def counts(self) -> Tensor:
        """The real rows of each engine in this pass, [size] int32."""
        return self._counts[self._phase]

    def gather(self, x: Tensor) -> Tensor:
        """Every engine's x, padded to the same number of rows R: [M, n] -> [size * R, n]."""
        missing = self._rows[self._phase] - x.shape[0]
        if missing > 0:
            x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
        return self._communicator.all_gather(x.contiguous()).view(-1, x.shape[1])

    def sum_back(self, parts: Tensor, num_rows: int) -> Tensor:
        """The sum over engines of this one's rows: [size * R, n] -> [M, n]; M is `num_rows`."""
        return self._communicator.reduce_scatter(parts.contiguous())[:num_rows]


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of each layer: those of all engines together."""

    rank: int
    size: int
    exchange: RowExchange
    engine: int = 0  # of this rank

    def share(self, num_experts: int) -> Cut:
        """The experts that this rank holds. Raises ModelLoadError if they cannot be divided."""
        if num_experts % self.size:
            raise ModelLoadError(
                f"the model's {num_experts} experts cannot be divided among the {self.size} ranks "
                "of --data-parallel-size times --tensor-parallel-size; use sizes whose product "
                f"divides {num_experts}."
            )
        each = num_experts // self.size
        return Cut(0, self.rank * each, (self.rank + 1) * each)

    def without_tensor_parallel(self) -> ExpertRanks:
        """For a model that each rank of an engine has whole: only engines share its experts."""
        return replace(self, rank=self.engine, size=self.exchange.size)

    def gather(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all engines and their experts, in one collective.

        x [M, H]; weights [M, k] float32; ids [M, k] -> [T, H], [T, k] and int32 [T, k].
        """
        top_k, width = ids.shape[1], x.shape[1] * x.element_size()
        parts = [x, ids.to(torch.int32), weights]
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        rows = self.exchange.gather(packed)  # [T, bytes]
        columns = torch.split(rows, [width, 4 * top_k, 4 * top_k], 1)
        kinds = (x.dtype, torch.int32, torch.float32)
        found = [part.contiguous().view(kind) for part, kind in zip(columns, kinds, strict=True)]
        return found[0], found[2], found[1]


class SilentRows:
    """A `RowCommunicator` without other engines, for models of meta tensors."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self._size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // self._size, *x.shape[1:])


def padded_counts(tokens: Sequence[int], requests: Sequence[int]) -> Tensor:
    """The counts for `RowExchange.begin_step`: [2, size] int32 on the host."""
    return torch.tensor([list(tokens), list(requests)], dtype=torch.int32)
