"""Hands a finished step to the drafter, and its drafts to the request table.

It does not know how drafts are made; it keeps what a plan and the requests allow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...configs.graphs import BatchExecutionDescriptor, StepMode
from ...configs.speculative import MAX_DRAFTS
from ...speculators.base import BaseSpeculator, DraftInputs, StepBuffers
from ..attention.base import AttentionState
from ..batch.input_batch import InputBatch, InputBuffers
from ..batch.request_table import RequestTable
from ..batch.staging import StagingPool
from ..graphs.manager import RebuiltStates
from ..scheduling.plan import StepPlan
from .data_parallel import StepAgreement
from .target import ForwardOutput, Target


class Drafting:
    """One drafter's part of every step."""

    def __init__(
        self,
        speculator: BaseSpeculator,
        table: RequestTable,
        target: Target,
        buffers: InputBuffers,
        counts: Tensor | None,  # [2, R] int32, of `ChoiceGraphs`; None: drafts follow no graph
    ) -> None:
        self._speculator = speculator
        self._table, self._target, self._buffers = table, target, buffers
        self._counts = counts
        self._most_drafts = torch.full(
            (table.max_num_reqs,), MAX_DRAFTS, dtype=torch.int32, device=table.device
        )  # [R] by batch row
        self._most_drafts_cpu: int | list[int] = MAX_DRAFTS  # of all rows, or by row
        self._staging = StagingPool(table.device)
        self._drafted: set[int] = set()  # slots that may hold drafts

    def capture(self, attention_states: RebuiltStates) -> None:
        """Capture the drafter's graphs; behind graphs that commit steps, they read these."""
        if self._counts is not None:
            steps = StepBuffers(self._step_in_buffers, self._table, self._most_drafts)
            self._speculator.read_steps(steps)
        self._speculator.capture(attention_states)

    def _step_in_buffers(self, desc: BatchExecutionDescriptor) -> DraftInputs:
        """See `StepBuffers`."""
        assert self._counts is not None and desc.num_reqs is not None
        reqs, tokens, buffers = desc.num_reqs, desc.num_tokens, self._buffers
        hidden, taps = self._target.outputs(desc)
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
            aux_hidden_states=taps,
            in_buffers=True,
        )

    def run(
        self,
        plan: StepPlan,
        batch: InputBatch,
        attention: AttentionState | None,  # None: the target's graph made its own
        outputs: ForwardOutput,
        num_sampled: Tensor,  # [N] int32
        num_rejected: Tensor,  # [N] int32
        agreement: StepAgreement | None,
    ) -> None:
        """Draft for the rows of a step that is committed, or let the drafter take it in later."""
        in_buffers = self._counts is not None and batch.mode is StepMode.WHOLE
        if in_buffers:
            self._fill_counts(num_sampled, num_rejected)
        if attention is None and not self._speculator.takes_in(batch.descriptor):
            attention = self._target.build_attention(batch)
        if self._speculator.keeps_drafts:
            self._fill_most_drafts(plan)
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
            common=batch.common,
            hidden_states=outputs[0],
            aux_hidden_states=outputs[1],
            num_drafts=plan.num_drafts if agreement is None else agreement.num_drafts,
            num_decode_reqs=0 if agreement is None else agreement.num_draft_reqs,
            num_deferred=[row.num_deferred for row in plan.rows],
            in_buffers=in_buffers,
        )
        if plan.defers_drafter:
            self._speculator.defer(inputs)
            self._store_no_drafts(batch)
            return
        drafts = self._speculator.propose(inputs)  # [N, up to K]
        if plan.num_drafts == 0:
            self._store_no_drafts(batch)
        elif self._speculator.keeps_drafts:
            self._drafted.update(batch.slots)
        else:
            # Another rank may have wanted more.
            self._store_drafts(batch, plan, drafts[:, : plan.num_drafts], num_sampled)

    def _fill_counts(self, num_sampled: Tensor, num_rejected: Tensor) -> None:
        """Where no graph left them, since the step chose its tokens without one."""
        assert self._counts is not None
        rows = num_sampled.shape[0]
        for kept, counts in zip(self._counts, (num_sampled, num_rejected), strict=True):
            if counts.data_ptr() != kept.data_ptr():
                kept[:rows].copy_(counts)

    def _fill_most_drafts(self, plan: StepPlan) -> None:
        """How many drafts each row of the plan may keep; mostly what it was before."""
        most: int | list[int] = MAX_DRAFTS if plan.num_drafts is None else plan.num_drafts
        if any(row.next_drafts is not None for row in plan.rows):
            most = _next_drafts(plan).tolist()
        if most == self._most_drafts_cpu:
            return
        self._most_drafts_cpu = most
        if isinstance(most, int):
            self._most_drafts.fill_(most)
        else:
            rows = np.array(most, dtype=np.int32)
            self._staging.upload(rows, out=self._most_drafts[: len(most)])

    def _store_no_drafts(self, batch: InputBatch) -> None:
        """Forget older drafts of the step's requests; mostly there are none."""
        if not self._drafted.isdisjoint(batch.slots):
            slots = batch.idx_mapping[: batch.num_reqs].long()  # [N] batch row -> slot
            self._table.draft_tokens.index_fill_(0, slots, -1)
            self._drafted.difference_update(batch.slots)

    def _store_drafts(
        self, batch: InputBatch, plan: StepPlan, drafts: Tensor, num_sampled: Tensor
    ) -> None:
        table = self._table
        self._drafted.update(batch.slots)
        slots = batch.idx_mapping[: batch.num_reqs]  # [N] batch row -> slot
        missing = table.num_speculative_tokens - drafts.shape[1]
        if missing:  # the speculator chose fewer than K
            drafts = pad(drafts, (0, missing), value=-1)
        steps = torch.arange(drafts.shape[1], device=drafts.device)
        # No draft beyond the request's cap, and none for a prompt that is not finished.
        most = table.max_drafts[slots]
        if any(row.next_drafts is not None for row in plan.rows):
            most = torch.minimum(most, self._staging.upload(_next_drafts(plan)))
        wanted = (steps < most[:, None]) & (num_sampled > 0)[:, None]
        # index_copy_, as assignment by index to a number would wait for the device.
        table.draft_tokens.index_copy_(0, slots.long(), torch.where(wanted, drafts, -1))


def _next_drafts(plan: StepPlan) -> np.ndarray:
    """[N] int32, the most drafts for each row's next one."""
    most = MAX_DRAFTS if plan.num_drafts is None else plan.num_drafts
    given = [most if row.next_drafts is None else row.next_drafts for row in plan.rows]
    return np.array(given, dtype=np.int32)
