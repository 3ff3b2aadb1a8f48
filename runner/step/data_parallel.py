"""Lets data-parallel ranks agree on each forward pass: same padded size and mode, or no work.

With expert parallelism every MoE layer contains a collective, in graphs too. So all ranks must run
the same number of passes of the same size, all from graphs or none. One all-reduce per step, on a
CPU group, decides the target's pass and the drafter's. Nothing here knows models. A rank here is an
engine; if its model is on several tensor-parallel ranks, each of them decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ..errors import DataParallelError
from ..graphs.dispatch import eager_descriptor
from ..parallel.engine_group import EngineGroup
from ..parallel.expert_loads import ExpertLoads, find_loads
from ..parallel.experts import RowExchange, padded_counts
from ..parallel.ranks import Communicator
from .target import Target

NUM_ROWS = 7  # of the table that ranks share, with one column per rank
_TOKENS, _MODE, _UNIFORM, _MAX_QUERY, _MICROBATCH, _REQS, _DRAFTS = range(NUM_ROWS)


# `CudaGraphManager.dispatch`. All ranks have captured the same graphs, so it is the same on each.
Dispatch = Callable[..., BatchExecutionDescriptor]


@dataclass(frozen=True)
class RankBatch:
    """The pass that one rank would run alone; `num_tokens` 0 = idle."""

    num_tokens: int
    num_reqs: int
    uniform_token_count: int | None
    max_query_len: int | None = None
    mode: CUDAGraphMode = CUDAGraphMode.NONE  # by its own dispatch
    num_drafts: int = 0  # drafts that it wants for each request after the step


@dataclass(frozen=True)
class StepAgreement:
    """The passes that all ranks run; equal on every rank, except `descriptor` in an eager step."""

    has_work: bool  # False: no rank runs anything in this step
    descriptor: BatchExecutionDescriptor  # of this rank's target pass
    num_tokens_across_dp: tuple[int, ...]  # [dp] rows that each rank's MoE layers see
    num_draft_reqs: int  # N of every draft decode on every rank; its dispatch is (N, N, 1)
    uniform_token_count: int | None  # of all ranks with work
    num_drafts: int = 0  # drafts that every rank makes: the most that any rank wants
    kept_drafts: int = 0  # of them, those that this rank keeps for its next step
    # [dp] each rank's tokens and requests, without dummies and padding
    real_tokens: tuple[int, ...] = ()
    real_reqs: tuple[int, ...] = ()


def encode(batch: RankBatch, rank: int, size: int) -> Tensor:
    """This rank's column of the table, zeros elsewhere; [7, dp] int32 on the CPU."""
    table = torch.zeros(NUM_ROWS, size, dtype=torch.int32)
    table[:, rank] = torch.tensor(
        [
            batch.num_tokens,
            int(batch.mode.value),
            batch.uniform_token_count or 0,
            -1 if batch.max_query_len is None else batch.max_query_len,
            0,  # microbatching is not supported
            batch.num_reqs,
            batch.num_drafts,
        ]
    )
    return table


def decide(
    table: Sequence[Sequence[int]],  # [7][dp], the columns of all ranks
    rank: int,
    dispatch: Dispatch,
    idle_query_len: int,  # K + 1, the same on all ranks
) -> StepAgreement:
    """Decide what all ranks run from what each would run alone.

    This is a pure function, so that all ranks decide the same. Idle ranks take part with one dummy
    request. They do not influence mode and query length, as they would make the others run eagerly.
    """
    tokens, reqs = list(table[_TOKENS]), list(table[_REQS])
    real = tuple(tokens), tuple(reqs)
    busy = [index for index, count in enumerate(tokens) if count > 0]
    if not busy:
        nothing = eager_descriptor(0, 0, None)
        return StepAgreement(False, nothing, tuple(0 for _ in tokens), 0, None)
    lengths = {table[_UNIFORM][index] for index in busy}
    agreed = lengths.pop() if len(lengths) == 1 else 0
    uniform = agreed or None
    dummy = agreed or idle_query_len
    for index, count in enumerate(tokens):
        if count == 0:
            tokens[index], reqs[index] = dummy, 1
    kept = _kept_drafts(table, rank, busy)
    mode = CUDAGraphMode(min(table[_MODE][index] for index in busy))
    most_tokens, most_reqs, drafts = max(tokens), max(reqs), max(table[_DRAFTS])
    desc = eager_descriptor(0, 0, None)
    if mode is not CUDAGraphMode.NONE:
        desc = dispatch(most_tokens, most_reqs, uniform, mode)
    if desc.mode is CUDAGraphMode.NONE:
        own = uniform or table[_UNIFORM][rank] or None
        desc = eager_descriptor(tokens[rank], reqs[rank], own)
        return StepAgreement(True, desc, tuple(tokens), most_reqs, uniform, drafts, kept, *real)
    across = (desc.num_tokens,) * len(tokens)
    return StepAgreement(True, desc, across, most_reqs, uniform, drafts, kept, *real)


def _kept_drafts(table: Sequence[Sequence[int]], rank: int, busy: Sequence[int]) -> int:
    """How many drafts a rank keeps for its next step: those that it wants, or the most that any
    rank wants.

    If all keep equally many, the next step is uniform on all ranks, so that it runs whole in
    graphs. They do if all of them decode and draft, and if no rank's step then has more rows than
    the largest step would have anyway, to which every rank's is padded.
    """
    wants = [table[_DRAFTS][index] for index in busy]
    most = max(wants)
    if rank in busy and min(wants) > 0 and all(table[_UNIFORM][index] for index in busy):
        reqs = [table[_REQS][index] for index in busy]
        largest = max(count * (want + 1) for count, want in zip(reqs, wants, strict=True))
        if max(reqs) * (most + 1) <= largest:
            return most
    return table[_DRAFTS][rank]


def create_sync(
    engines: EngineGroup | None, target: Target, idle_query_len: int
) -> DataParallelSync | None:
    """This rank's side; None if there are no other ranks."""
    if engines is None:
        return None
    call = None if engines.calls is None else engines.calls.send
    dispatch, loads = target.dispatch, find_loads(target.model)
    return DataParallelSync(
        dispatch, idle_query_len, engines.rank, engines.size, engines.host,
        engines.experts.exchange, call, loads,
    )  # fmt: skip


class DataParallelSync:
    """One rank's side of the agreement. All methods are called by the thread that runs steps."""

    def __init__(
        self,
        dispatch: Dispatch,
        idle_query_len: int,
        rank: int,
        size: int,
        host: Communicator,
        exchange: RowExchange | None = None,  # of the ranks' MoE layers
        call: Callable[[int], None] | None = None,  # calls the other ranks to a wave
        loads: ExpertLoads | None = None,
    ) -> None:
        self.loads = loads
        self.num_exchanges = 0
        self.wave = 0  # the number of times that all ranks have come to rest
        self.kept_drafts = 0  # see `StepAgreement`; of the newest step; other threads may read it
        self.is_active = False  # some rank had work in the last step; other threads may read it
        self._dispatch = dispatch
        self._idle_query_len = idle_query_len
        self._rank = rank
        self._size = size
        self._host = host
        self._exchange = exchange
        self._call = call

    def takes_part(self, wave: int | None) -> bool:
        """Whether this rank must `agree` although it has no work.

        `wave`: another rank has called to that wave; None: nobody has.
        """
        return self.is_active if wave is None else not self.is_active and wave == self.wave

    def agree(
        self, num_tokens: int, num_reqs: int, uniform: int | None, num_drafts: int = 0
    ) -> StepAgreement:
        """Agree on this step, and prepare the exchange for its passes. Calls resting ranks.

        While `is_active`, every rank must call it once per step, even if it is idle.
        """
        if not self.is_active and num_tokens and self._call is not None:
            self._call(self.wave)
        desc = self._dispatch(num_tokens, num_reqs, uniform)
        batch = RankBatch(num_tokens, num_reqs, uniform, uniform, desc.mode, num_drafts)
        table = self._sum_over_ranks(encode(batch, self._rank, self._size))
        found = decide(table.tolist(), self._rank, self._dispatch, self._idle_query_len)
        self.is_active, self.kept_drafts = found.has_work, found.kept_drafts
        self.wave += not found.has_work
        if found.has_work and self._exchange is not None:
            counts = padded_counts(found.real_tokens, found.real_reqs)
            most = max(found.num_tokens_across_dp)
            has_graphs = found.descriptor.mode is not CUDAGraphMode.NONE
            self._exchange.begin_step(most, found.num_draft_reqs, counts, has_graphs)
        if found.has_work and self.loads is not None:
            self.loads.poll()
        return found

    def _sum_over_ranks(self, table: Tensor) -> Tensor:
        """The sum of the tables of all ranks. Raises DataParallelError if one of them is gone."""
        self.num_exchanges += 1
        try:
            return self._host.all_reduce(table)
        except RuntimeError as error:
            raise DataParallelError(self._rank, error) from error
