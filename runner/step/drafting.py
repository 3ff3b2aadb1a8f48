"""Passes each finished step to the drafter, and stores its drafts in the request table.

It stores the drafts that the plan and the requests allow, and does not know how they are made.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...configs.graphs import BatchExecutionDescriptor, StepMode
from ...configs.speculative import MAX_DRAFTS
from ...speculators.base import BaseSpeculator, DraftInputs
from ..attention.base import AttentionState
from ..batch.host_copy import StagingPool
from ..batch.input_batch import InputBatch, InputBuffers
from ..batch.request_table import RequestTable
from ..batch.sampling_state import Feature
from ..drafters.draft_graphs import DraftGraphs
from ..graphs.manager import RebuiltStates
from ..parallel.ranks import Ranks
from ..scheduling.plan import StepPlan
from .data_parallel import StepAgreement
from .target import ForwardOutput, Target


class Drafting:
    """One drafter's part of every step."""

    def __init__(
        self,
        speculator: BaseSpeculator,
        graphs: DraftGraphs | None,  # runs the speculator's passes; None: it has `propose`
        table: RequestTable,
        target: Target,
        buffers: InputBuffers,
        counts: Tensor | None,  # [2, R] int32, of `TokenGraphs`; None: there are none
    ) -> None:
        self._speculator = speculator
        self._graphs = graphs
        self._table, self._target, self._buffers = table, target, buffers
        if counts is None:
            counts = torch.zeros((2, table.max_num_reqs), dtype=torch.int32, device=table.device)
        self._counts = counts  # [2, R] num_sampled and num_rejected by batch row
        self._staging = StagingPool(table.device)
        self._drafted: set[int] = set()  # slots that may hold drafts
        ranks: Ranks | None = getattr(getattr(target.model, "format", None), "ranks", None)
        # A user's class may draft differently on each rank, but all must verify the same drafts.
        self._drafts_of_first = None if _is_ours(speculator) else ranks

    def capture(self, attention_states: RebuiltStates) -> None:
        if self._graphs is not None:
            self._graphs.capture(attention_states, self._whole_step)

    def _whole_step(self, desc: BatchExecutionDescriptor) -> DraftInputs | None:
        """See `draft_graphs.WholeStep`."""
        if self._target.step_mode(desc) is not StepMode.WHOLE:
            return None
        assert desc.num_reqs is not None
        reqs, tokens, buffers = desc.num_reqs, desc.num_tokens, self._buffers
        hidden, aux_hidden = self._target.outputs(desc)
        return DraftInputs(
            num_reqs=reqs,
            num_tokens=tokens,
            descriptor=desc,
            idx_mapping=buffers.idx_mapping[:reqs],
            query_start_loc=buffers.query_start_loc[: reqs + 1],
            seq_lens=buffers.seq_lens[:reqs],
            input_ids=buffers.input_ids[:tokens],
            positions=buffers.positions[:tokens],
            num_sampled=self._counts[0, :reqs],
            num_rejected=self._counts[1, :reqs],
            requests=self._table,
            hidden_states=hidden,
            aux_hidden_states=aux_hidden,
            mode=StepMode.WHOLE,
        )

    def run(
        self,
        plan: StepPlan,
        batch: InputBatch,
        attention: AttentionState | None,  # None in a WHOLE step
        outputs: ForwardOutput,
        num_sampled: Tensor,  # [N] int32
        num_rejected: Tensor,  # [N] int32
        agreement: StepAgreement | None,
    ) -> None:
        """Draft for the rows of a committed step, or let the drafter process it later."""
        if batch.mode is StepMode.WHOLE:
            self._fill_counts(num_sampled, num_rejected)
        inputs = DraftInputs(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            descriptor=batch.descriptor,
            idx_mapping=batch.idx_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            input_ids=batch.input_ids,
            positions=batch.positions,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            requests=self._table,
            attention=attention,
            hidden_states=outputs[0],
            aux_hidden_states=outputs[1],
            num_drafts=plan.num_drafts if agreement is None else agreement.num_drafts,
            num_decode_reqs=0 if agreement is None else agreement.num_draft_reqs,
            num_deferred=[row.num_deferred for row in plan.rows],
            mode=batch.mode,
            all_greedy=not self._table.sampling.features(batch.slots) & Feature.RANDOM,
        )
        kept = plan.num_drafts  # of those that are made; another rank may have wanted more
        if kept and agreement is not None:
            kept = agreement.kept_drafts
        if plan.defers_drafter:
            (self._graphs or self._speculator).defer(inputs)
        elif self._graphs is not None:
            self._graphs.limit(_most_drafts(plan, kept))
            self._graphs.propose(inputs)
        else:
            drafts = self._speculator.propose(inputs)  # [N, up to K]
            if kept != 0:
                limit = _most_drafts(plan, kept)
                self._store_drafts(batch, limit, drafts[:, :kept], num_sampled)
        if kept == 0:
            self._store_no_drafts(batch)
        else:
            self._drafted.update(batch.slots)
            if self._drafts_of_first is not None:
                drafts = self._table.draft_tokens
                drafts.copy_(self._drafts_of_first.communicator.all_gather(drafts)[0])

    def run_dummy(self, agreement: StepAgreement, attention: AttentionState | None) -> None:
        """The drafter's passes in a step without rows; the passes of other ranks need them."""
        if self._graphs is not None:
            self._graphs.run_dummy(
                agreement.descriptor, attention, agreement.num_draft_reqs, agreement.num_drafts
            )

    def _fill_counts(self, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Copy the counts to where graphs read them, unless a graph has written them there."""
        rows = num_sampled.shape[0]
        for kept, counts in zip(self._counts, (num_sampled, num_rejected), strict=True):
            if counts.data_ptr() != kept.data_ptr():
                kept[:rows].copy_(counts)

    def _store_no_drafts(self, batch: InputBatch) -> None:
        """Erase older drafts of the step's requests; usually there are none."""
        if not self._drafted.isdisjoint(batch.slots):
            slots = batch.idx_mapping[: batch.num_reqs].long()  # [N] batch row -> slot
            self._table.draft_tokens.index_fill_(0, slots, -1)
            self._drafted.difference_update(batch.slots)

    def _store_drafts(
        self, batch: InputBatch, limit: int | list[int], drafts: Tensor, num_sampled: Tensor
    ) -> None:
        table = self._table
        slots = batch.idx_mapping[: batch.num_reqs]  # [N] batch row -> slot
        missing = table.num_speculative_tokens - drafts.shape[1]
        if missing:  # the speculator chose fewer than K
            drafts = pad(drafts, (0, missing), value=-1)
        steps = torch.arange(drafts.shape[1], device=drafts.device)
        # No draft beyond the request's cap, and none for an unfinished prompt.
        most = table.max_drafts[slots]
        if isinstance(limit, list):
            most = torch.minimum(most, self._staging.upload(np.array(limit, dtype=np.int32)))
        wanted = (steps < most[:, None]) & (num_sampled > 0)[:, None]
        # index_copy_, because an indexed assignment would wait for the device.
        table.draft_tokens.index_copy_(0, slots.long(), torch.where(wanted, drafts, -1))


def _is_ours(speculator: BaseSpeculator) -> bool:
    """Whether a drafter is of this package, so that it drafts the same on every rank."""
    package = BaseSpeculator.__module__.rpartition(".")[0]
    return type(speculator).__module__.rpartition(".")[0] == package


def _most_drafts(plan: StepPlan, kept: int | None) -> int | list[int]:
    """How many drafts are stored after this step, for all rows or for each: at most `kept`, and
    what the plan allows to a row."""
    most = MAX_DRAFTS if kept is None else kept
    if all(row.next_drafts is None for row in plan.rows):
        return most
    return [most if row.next_drafts is None else min(most, row.next_drafts) for row in plan.rows]
