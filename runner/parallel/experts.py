"""Experts that the engines of `-dp` share: which of them a rank holds, and the exchange of rows.

A layer gathers the rows of all engines, computes what its own experts contribute to each, and every
engine gets the sums of its rows back. With `--all2all-backend all_to_all`, rows go only to the
ranks that have their experts, where a step runs without CUDA graphs. All ranks must run the same
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.linear.moe import own_experts
from .all_to_all import plan_transfer
from .ranks import CannotDivide, Communicator, Cut

_ALL_ROWS = (1 << 31) - 1  # outside steps, every row of a pass counts
# rows [T, H], weights [T, k] and indices [T, k] of experts here, -1 for others -> [T, H]
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


class RowExchange:
    """Brings the rows of all engines to each of them, and the sums of its own rows back.

    The rows of a step's first passes are tokens, those of its draft decodes are requests.
    """

    def __init__(
        self,
        communicator: Communicator,  # of the engines
        size: int,
        device: torch.device,
        all_to_all: bool = False,
    ) -> None:
        """`size` is the number of engines; `all_to_all`: rows go only where they are needed."""
        self.size, self.all_to_all = size, all_to_all
        self.communicator = communicator
        # Real rows of each engine, in passes over tokens and in draft decodes. Graphs read them.
        self._counts = torch.full((2, size), _ALL_ROWS, dtype=torch.int32, device=device)
        self._rows = [0, 0]  # the most rows, padding included, of any engine
        self._known: list[list[int]] | None = None  # the counts, where no graph reads them
        self._phase = 0

    def begin_step(
        self, num_tokens: int, num_reqs: int, counts: Tensor, has_graphs: bool = True
    ) -> None:
        """Prepare for the passes of a step.

        `num_tokens` and `num_reqs` are the most rows, padding included, that any engine's passes
        have. `counts` [2, size] int32 are the real rows of each engine, tokens and then requests.
        Every engine must say the same of `has_graphs`: whether the target's pass is a graph.
        """
        self._counts.copy_(counts, non_blocking=True)
        self._rows, self._phase = [num_tokens, num_reqs], 0
        self._known = None if has_graphs or self._counts.is_meta else counts.tolist()

    def begin_decodes(self, are_next: bool = True) -> None:
        """Declare the next passes draft decodes, or else passes over tokens."""
        self._phase = int(are_next)

    @property
    def counts(self) -> Tensor:
        """The real rows of each engine in this pass, [size] int32."""
        return self._counts[self._phase]

    @property
    def known_counts(self) -> list[int] | None:
        """The real rows of each engine, if this pass may send them where they are needed."""
        return self._known[self._phase] if self.all_to_all and self._known is not None else None

    def gather(self, x: Tensor) -> Tensor:
        """Every engine's x, padded to the same number of rows R: [M, n] -> [size * R, n]."""
        missing = self._rows[self._phase] - x.shape[0]
        if missing > 0:
            x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
        return self.communicator.all_gather(x.contiguous()).view(-1, x.shape[1])

    def sum_back(self, parts: Tensor, num_rows: int) -> Tensor:
        """The sum over engines of this one's rows: [size * R, n] -> [M, n]; M is `num_rows`."""
        parts = parts.contiguous()
        if not self.all_to_all:
            return self.communicator.reduce_scatter(parts)[:num_rows]
        back = self.communicator.all_to_all(parts).view(self.size, -1, parts.shape[1])
        return back[:, :num_rows].sum(0)  # in float32, rounded once


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of each layer: those of all engines together."""

    rank: int
    size: int
    exchange: RowExchange
    engine: int = 0  # of this rank

    def share(self, num_experts: int) -> Cut:
        """The experts that this rank holds. Raises CannotDivide if they cannot be divided."""
        if num_experts % self.size:
            raise CannotDivide(
                f"the model's {num_experts} experts cannot be divided among the {self.size} ranks "
                "of --data-parallel-size times --tensor-parallel-size; use sizes whose product "
                f"divides {num_experts}."
            )
        each = num_experts // self.size
        return Cut(0, self.rank * each, (self.rank + 1) * each)

    def without_tensor_parallel(self) -> ExpertRanks:
        """For a model that each rank of an engine has whole: only engines share its experts."""
        return replace(self, rank=self.engine, size=self.exchange.size)

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        own: Cut,
        loads: Tensor,
        compute: RunExperts,
    ) -> Tensor:
        """The weighted sum of each row's experts, whichever ranks have them, [M, H].

        x [M, H]; weights [M, k] float32; ids [M, k]; `own`: the experts here. Adds the pairs of
        all engines' rows to `loads` [1 + own experts]; see `kernels.linear.moe.own_experts`.
        """
        exchange, top_k = self.exchange, ids.shape[1]
        counts = exchange.known_counts
        if counts is None:
            rows, weights, ids = _unpack(exchange.gather(_pack(x, weights, ids)), x.dtype, top_k)
            here = own_experts(ids, own.start, own.size, exchange.counts, loads)
            return exchange.sum_back(compute(rows, weights, here), x.shape[0])
        # A row goes once to each rank that has some of its experts.
        num_rows = counts[self.engine]
        owners = self._engines_of(ids[:num_rows], own.size)
        transfer = plan_transfer(owners, exchange.size, exchange.communicator)
        packed = transfer.send(_pack(x[:num_rows], weights[:num_rows], ids[:num_rows]))
        # Pairs of rows that stay elsewhere, which are not seen here, count as well.
        loads[0] += (sum(counts) - transfer.num_received) * top_k
        parts = x.new_empty(0, x.shape[1])
        if transfer.num_received:
            rows, weights, ids = _unpack(packed, x.dtype, top_k)
            del packed  # for the memory of the experts
            real = ids.new_full((1,), transfer.num_received)
            parts = compute(rows, weights, own_experts(ids, own.start, own.size, real, loads))
        return transfer.sum_back(parts, x.shape[0])

    def _engines_of(self, ids: Tensor, each: int) -> Tensor:
        """The engine of which this rank's peer holds an expert; -1 if another of its ranks does.

        A peer is the rank with the same number in another engine; a rank has `each` experts.
        """
        ranks, width = ids // each, self.size // self.exchange.size
        if width == 1:
            return ranks
        return torch.where(ranks % width == self.rank % width, ranks // width, -1)


def _pack(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows with their experts, so that one collective moves both: [M, bytes] uint8."""
    parts = [x, ids.to(torch.int32), weights]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _unpack(packed: Tensor, dtype: torch.dtype, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, H] of a dtype, weights [T, k] float32 and ids [T, k] int32 from `_pack`."""
    sizes = [packed.shape[1] - 8 * top_k, 4 * top_k, 4 * top_k]
    columns = torch.split(packed, sizes, 1)
    kinds = (dtype, torch.int32, torch.float32)
    found = [part.contiguous().view(kind) for part, kind in zip(columns, kinds, strict=True)]
    return found[0], found[2], found[1]


def padded_counts(tokens: Sequence[int], requests: Sequence[int]) -> Tensor:
    """The counts for `RowExchange.begin_step`: [2, size] int32 on the host."""
    return torch.tensor([list(tokens), list(requests)], dtype=torch.int32)
