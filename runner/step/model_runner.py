"""Runs one step of a `StepPlan`: stage, gather, forward or replay, sample or verify, draft.

It owns neither request data (see `request_table`) nor KV memory (see `kv_cache`), and does not
decide what runs. No step waits for the device, unless the plan needs draft ids on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...configs.graphs import StepMode
from ...kernels.batch.gather_batch import post_update
from ..attention.base import AttentionState
from ..batch.host_copy import CopyStream, HostCopy, StagingPool
from ..batch.input_batch import InputBatch
from ..batch.sampling_state import Feature
from ..batch.step_output import RowLayout, StepHandle, StepTensors
from ..graphs.capture import paused_garbage_collector
from ..graphs.manager import CaptureReport, RebuiltStates
from ..sampling.logprobs import PromptLogprobs
from ..scheduling.plan import StepPlan
from .data_parallel import StepAgreement
from .draft_reports import DraftReports, Report
from .drafting import Drafting
from .parts import RunnerFacts, RunnerParts
from .traffic import EngineT, note_traffic
from .warm_up import different_tokens


@dataclass
class _Step:
    """A step between `forward` and `sample`."""

    plan: StepPlan
    batch: InputBatch | None = None  # None: no rows
    state: AttentionState | None = None
    hidden_states: Tensor | None = None  # [M*, H]
    aux_hidden_states: Tensor | None = None  # [M*, boundaries * H]
    drafts: Future[tuple[HostCopy, list[int]]] = field(default_factory=Future)
    error: BaseException | None = None
    faults: dict[int, str] = field(default_factory=dict)  # slot -> why its request ends
    agreement: StepAgreement | None = None  # with the other ranks; None: no other ranks
    report: Report | None = None  # of the drafts that it verifies; None: nobody wants them


class ModelRunner:
    """Runs the steps of one device.

    All calls come from one thread in the order of steps; two steps may be in flight.
    """

    idle_seconds: float | None = None  # how often `check` must run while there is no work

    def __init__(self, parts: RunnerParts) -> None:
        self.facts: RunnerFacts = parts.facts
        self.table = parts.table
        self.buffers = parts.buffers
        self._target = target = parts.target
        self.sampling = parts.sampling
        self._token_graphs = parts.token_graphs
        self.speculator = parts.speculator
        self._drafting: Drafting | None = None
        if parts.speculator is not None:
            counts = None if parts.token_graphs is None else parts.token_graphs.counts
            self._drafting = Drafting(
                parts.speculator, parts.draft_graphs, parts.table, target, self.buffers, counts
            )
        self._draft_graphs = parts.draft_graphs
        self._queue = parts.queue
        self.sync = parts.sync  # with engines that share the experts; None: there are none
        self._prompt_logprobs = PromptLogprobs(target.compute_logits, self.facts.vocab_size)
        self._draft_reports = DraftReports(self.table.device)
        self._staging = StagingPool(self.table.device)
        self._steps: dict[int, _Step] = {}  # step id -> step that awaits `sample`
        self._error: BaseException | None = None  # raised after a step's results were published
        self._on_cpu = self.facts.device == "cpu"
        self._dummy_tokens: Tensor | None = None  # [R, K + 1], see `fill_tokens`
        on_cuda = self.facts.device == "cuda"
        self._copy_stream = CopyStream() if on_cuda else None

    # --- the engine's interface -----------------------------------------------------------------

    def forward(self, plan: StepPlan) -> None:
        """Submit the step's forward pass to the device queue. `sample` must follow.

        Errors are not raised here, but by `take_draft_token_ids` or the handle that `sample`
        returns.
        """
        step = self._steps[plan.step_id] = _Step(plan)

        def job() -> None:
            try:
                self._forward(step)
            except BaseException as error:
                step.error = error
                if not step.drafts.done():
                    step.drafts.set_exception(error)

        self._queue.submit(job)

    def take_draft_token_ids(self, plan: StepPlan) -> list[list[int]]:
        """Wait for the drafts that this step verifies, by row. Call it before `sample`.

        Each row has len(ids) + 1 logits rows, in plan order; a grammar bitmask must have the same
        layout. An id of -1 means that there is no draft.
        """
        assert plan.needs_draft_ids, "the plan does not need draft ids"
        copy, counts = self._steps[plan.step_id].drafts.result()
        ids = copy.wait()[0].tolist() if counts else []
        copy.release()
        drafts, at = [], 0
        for count in counts:
            drafts.append(ids[at : at + count])
            at += count + 1
        return drafts

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None = None) -> StepHandle:
        """Submit sampling and drafting of a step to the device queue, after `forward`.

        `grammar_bitmask` [L, ceil(V / 32)] int32 on the host has a bit for each allowed token of
        each logits row; see `take_draft_token_ids` for the rows. It is copied. The handle raises
        errors of the step's forward pass and sampling. An error after the results were published,
        as in drafting, is raised by the handles of all later steps.
        """
        step = self._steps.pop(plan.step_id)
        handle = StepHandle()
        # A copy, because the caller may reuse the array before this step runs.
        mask = None if grammar_bitmask is None else np.array(grammar_bitmask, order="C")

        def job() -> None:
            try:
                if step.error is not None:
                    raise step.error
                if self._error is not None:
                    raise self._error
                self._sample(step, mask, handle)
            except BaseException as error:
                if not handle.fail(error):
                    self._error = error

        self._queue.submit(job)
        return handle

    def execute(self, plan: StepPlan) -> StepHandle:
        """Submit `forward` and `sample` of a step without grammars."""
        self.forward(plan)
        return self.sample(plan)

    def check(self) -> None:
        """Raise RunnerError if other ranks have failed; there are none here."""

    def abandon(self) -> None:
        """End other ranks of the model, in place of `shutdown`, where steps in flight may wait for
        other engines for ever. The process must end next."""

    def warm_up(self) -> None:
        """Run a small step on dummy rows and wait for it, so that no request waits for set-up."""
        self._queue.call(self._warm_up)

    def capture(self) -> None:
        """Capture the graphs of target and drafter, if graphs are wanted; returns when done."""
        self._queue.call(self._capture)

    def capture_reports(self) -> list[CaptureReport]:
        """The report of each graph manager."""
        reports = [self._target.capture_report]
        if self._token_graphs is not None:
            reports += self._token_graphs.capture_reports
        if self._draft_graphs is not None:
            reports += [graphs.report for graphs in self._draft_graphs.managers]
        return [report for report in reports if report is not None]

    def note_traffic(self, engine: EngineT) -> EngineT:
        """Add the bytes that a decode step reads to the engine's `ready`; returns the engine."""
        note_traffic(engine.ready, self._target.model, self._target.cache, self.speculator)
        return engine

    def fill_tokens(self, num_slots: int, num_drafts: int) -> None:
        """Give the first slots a newest token and `num_drafts` drafts for the next step.

        All tokens differ, for dummy requests of which a model with experts reads as many as of real
        requests: equal rows would all choose the same experts.
        """

        def job() -> None:
            if self._dummy_tokens is None:
                shape = self.table.draft_tokens.shape
                tokens = different_tokens(shape[0] * (shape[1] + 1), self.facts.vocab_size)
                grid = torch.tensor(tokens).view(shape[0], shape[1] + 1)
                self._dummy_tokens = grid.to(self.table.device)
            rows = self._dummy_tokens[:num_slots]
            self.table.last_sampled_tokens[:num_slots] = rows[:, 0]
            self.table.draft_tokens[:num_slots, :num_drafts] = rows[:, 1 : num_drafts + 1]

        self._queue.submit(job)

    def exchange_drafter(self, swap: Callable[[], None]) -> None:
        """Call `swap`, which changes the drafter's weights, between two steps, and wait for it.

        Later steps verify no draft that was made with the old weights. Raises what `swap` raises.
        """

        def job() -> None:
            swap()
            self.table.forget_drafts()

        self._queue.call(job)

    def load_elsewhere(self, model: str) -> Callable[[], str | None]:
        """Let the other ranks of the model load a drafter. Returns a function that waits for them,
        and returns a sentence if one of them failed."""
        return lambda: None

    def drop_elsewhere(self) -> None:
        """Let the other ranks forget the drafter that they have loaded."""

    def synchronize(self) -> None:
        """Wait until everything launched so far has run, including drafting."""
        self._queue.call(lambda: None)
        if self._copy_stream is not None:
            torch.cuda.synchronize()

    def shutdown(self) -> None:
        self._queue.shutdown()

    # --- a step, top to bottom ------------------------------------------------------------------

    def _forward(self, step: _Step) -> None:
        plan = step.plan
        self.table.stage(plan)
        step.faults = self.table.apply_staged()
        if self._target.states is not None:
            self._target.states.apply(plan)
        self._prompt_logprobs.update(plan)
        self._draft_reports.update(plan)
        if not plan.rows:
            step.drafts.set_result((HostCopy([], None), []))
            self._forward_for_others(step)
            return
        batch = step.batch = self._gather(step)
        if self._draft_reports.is_asked:
            step.report = self._draft_reports.start(plan, self.table, self._copy_stream)
        if plan.needs_draft_ids:
            copy = HostCopy([batch.draft_ids.clone()], self._copy_stream)
            step.drafts.set_result((copy, batch.num_draft_tokens_cpu))
        if batch.mode is not StepMode.WHOLE:
            step.state = self._target.build_attention(batch)
        step.hidden_states, step.aux_hidden_states = self._target.run(batch, step.state)

    def _forward_for_others(self, step: _Step) -> None:
        """A step without rows runs a dummy pass if another rank has work."""
        if self.sync is None or not self.sync.takes_part(step.plan.wave):
            return
        step.agreement = agreement = self.sync.agree(0, 0, None)
        if agreement.has_work:
            step.state = self._target.run_dummy(agreement.descriptor)

    def _draft_for_others(self, step: _Step) -> None:
        agreement = step.agreement
        if self._drafting is not None and agreement is not None and agreement.has_work:
            self._drafting.run_dummy(agreement, step.state)

    def _gather(self, step: _Step) -> InputBatch:
        plan = step.plan
        query_lens = [row.num_tokens for row in plan.rows]
        num_drafts = [row.num_draft_tokens for row in plan.rows]
        if self._on_cpu and any(num_drafts):
            self._trim_drafts(plan, query_lens, num_drafts)
        uniform = query_lens[0] if len(set(query_lens)) == 1 else None
        if any(row.is_prefill for row in plan.rows):
            uniform = None
        if self.sync is None:
            desc = self._target.dispatch(sum(query_lens), len(query_lens), uniform)
        else:
            most = self.facts.needs.num_speculative_tokens
            wanted = most if plan.num_drafts is None else plan.num_drafts
            step.agreement = self.sync.agree(sum(query_lens), len(query_lens), uniform, wanted)
            desc = step.agreement.descriptor
        mode = self._target.step_mode(desc)
        # If the host needs the drafts, gather now; the graph will gather again.
        if uniform is not None and mode is StepMode.WHOLE and not plan.needs_draft_ids:
            return self.buffers.place([row.slot for row in plan.rows], num_drafts, desc, uniform)
        args = (plan.rows, query_lens, num_drafts, self.table, desc, uniform, mode)
        return self.buffers.gather(*args)

    def _trim_drafts(self, plan: StepPlan, query_lens: list[int], num_drafts: list[int]) -> None:
        """Drop trailing drafts of -1; on the CPU only, where reading them does not wait."""
        drafts = self.table.draft_tokens.numpy()
        for index, row in enumerate(plan.rows):
            count = num_drafts[index]
            while count and drafts[row.slot, count - 1] < 0:
                count -= 1
            query_lens[index] -= num_drafts[index] - count
            num_drafts[index] = count

    def _sample(self, step: _Step, grammar_bitmask: np.ndarray | None, handle: StepHandle) -> None:
        batch, hidden = step.batch, step.hidden_states
        if batch is None:
            handle.publish_empty()
            self._draft_for_others(step)
            return
        assert hidden is not None
        if step.faults:
            slots = [row.slot for row in step.plan.rows]
            handle.faults = {slots.index(slot): fault for slot, fault in step.faults.items()}
        handle.report = step.report
        graphs = None
        if (
            batch.mode is StepMode.WHOLE
            and self._token_graphs is not None
            and grammar_bitmask is None
        ):
            graphs = self._token_graphs.find(batch)
        if graphs is not None and self._token_graphs is not None:
            counts = self._token_graphs.run(graphs, batch, handle, self._copy_stream)
        else:
            counts = self._select_tokens(step, batch, hidden, grammar_bitmask, handle)
        if self._drafting is not None:
            self._draft(self._drafting, step, *counts)

    def _select_tokens(
        self,
        step: _Step,
        batch: InputBatch,
        hidden: Tensor,  # [M*, H]
        grammar_bitmask: np.ndarray | None,
        handle: StepHandle,
    ) -> tuple[Tensor, Tensor]:
        """Select tokens without a graph, publish and commit them.

        Returns num_sampled and num_rejected, [N] int32 each.
        """
        mask = None if grammar_bitmask is None else self._staging.upload(grammar_bitmask)
        target = self._target
        sampled = self.sampling.run(
            batch, hidden, self.table, mask, target.compute_logits, target.pick_tokens
        )
        num_logprobs = [self.table.sampling.num_logprobs[slot] for slot in batch.slots]
        tensors = StepTensors(
            sampled_token_ids=sampled.sampled_token_ids,
            num_sampled=sampled.num_sampled,
            num_draft_tokens=batch.num_draft_tokens.clone(),  # the buffer is rewritten next step
            has_nan=sampled.has_nan,
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompt_logprobs.compute(
                step.plan.rows, batch, hidden, self.table
            ),
        )
        handle.publish(tensors, RowLayout(num_logprobs), self._copy_stream)
        counts_output = self.table.sampling.features(batch.slots) & Feature.PENALTIES
        post_update(
            self.table,
            batch,
            sampled,
            self.table.sampling.output_bin_counts if counts_output else None,
        )
        return sampled.num_sampled, sampled.num_rejected

    def _draft(
        self,
        drafting: Drafting,
        step: _Step,
        num_sampled: Tensor,  # [N] int32
        num_rejected: Tensor,  # [N] int32
    ) -> None:
        batch = step.batch
        assert batch is not None and step.hidden_states is not None
        outputs = (step.hidden_states, step.aux_hidden_states)
        drafting.run(
            step.plan, batch, step.state, outputs, num_sampled, num_rejected, step.agreement
        )

    # --- start-up -------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        self._target.warm_up()

    def _capture(self) -> None:
        with paused_garbage_collector(collect=False):
            states = self._target.capture()
            if self._token_graphs is not None:
                self._token_graphs.capture()
            if self._drafting is not None and states:
                # Rebuilt at each look-up, because the target's own pairs are already planned.
                create = self._target.create_forward_fn
                self._drafting.capture(RebuiltStates(list(states), create))
