"""A scheduler of plain lists that acts at random: it adds, finishes, preempts and verifies.

It compares every result with the oracle's continuation.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tiny_target import BLOCK, MAX_LEN, VOCAB, Oracle

from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import (
    NewBlocks,
    NewRequest,
    RowResult,
    ScheduledRow,
    StepPlan,
)
from slipstream.runner.step.model_runner import ModelRunner


def greedy(**options: Any) -> SamplingParams:
    """Temperature 0, unless `options` say otherwise."""
    return SamplingParams(**({"seed": 1, "max_tokens": MAX_LEN, "temperature": 0.0} | options))


@dataclass(eq=False)
class Job:
    """One request."""

    tokens: list[int]  # confirmed: prompt, then output
    prompt_len: int
    wanted: int  # length at which it is finished
    sampling: SamplingParams = field(default_factory=greedy)
    slot: int | None = None
    computed: int = 0  # host's upper bound
    prefill_len: int = 0
    blocks: list[int] = field(default_factory=list)
    incarnation: int = 0
    in_flight: int = 0
    draft_counts: list[int] = field(default_factory=list)


@dataclass
class Flight:
    """A launched step."""

    plan: StepPlan
    jobs: list[tuple[Job, int]]  # with the incarnation that the step serves
    handle: Any


class PlanMaker:
    """Makes random plans for a runner, up to `depth` in flight."""

    def __init__(
        self,
        runner: ModelRunner,
        oracle: Oracle | None,  # None: results are not checked
        rng: random.Random,
        depth: int = 2,
        num_drafts: int = 0,
        preempt: float = 0.05,
        max_chunk: int = 9,
    ) -> None:
        self.runner, self.oracle, self.rng, self.depth = runner, oracle, rng, depth
        self.num_drafts, self.preempt, self.max_chunk = num_drafts, preempt, max_chunk
        self.free_slots = list(range(runner.table.max_num_reqs))
        self.free_blocks = list(range(1, runner.facts.kv_groups[0].num_blocks))
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.done: list[Job] = []
        self.freed: list[int] = []
        self.flights: deque[Flight] = deque()
        self.step_id = 0

    def add(self, prompt_len: int, new_tokens: int, **options: Any) -> Job:
        """Queue a job with a random prompt; `options` are sampling parameters."""
        return self.add_prompt(
            [self.rng.randrange(VOCAB) for _ in range(prompt_len)], new_tokens, **options
        )

    def add_prompt(self, prompt: list[int], new_tokens: int, **options: Any) -> Job:
        """Queue a job."""
        prompt_len = len(prompt)
        job = Job(prompt, prompt_len, prompt_len + new_tokens, greedy(**options))
        self.waiting.append(job)
        return job

    def run(self, max_steps: int = 2000) -> None:
        """Until every job is done."""
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.flights):
                return
            self.step()
        raise AssertionError("the jobs do not finish")

    def step(self) -> None:
        """Launch a plan if one is possible; collect results once enough steps are in flight."""
        plan, jobs = self._make_plan()
        launched = bool(plan.rows or plan.freed_slots or plan.new_requests)
        if launched:
            self.runner.forward(plan)
            self.flights.append(Flight(plan, jobs, self.runner.sample(plan)))
        while self.flights and (len(self.flights) >= self.depth or not launched):
            self._land(self.flights.popleft())
            launched = True

    def drain(self) -> None:
        """Collect all results."""
        while self.flights:
            self._land(self.flights.popleft())
        self.runner.synchronize()

    # --- planning ---------------------------------------------------------------------------------

    def _make_plan(self) -> tuple[StepPlan, list[tuple[Job, int]]]:
        for job in list(self.running):
            if self.rng.random() < self.preempt:
                self._release(job)
                job.incarnation += 1
                self.waiting.append(job)
        plan = StepPlan(self.step_id, freed_slots=self.freed)
        self.freed, self.step_id = [], self.step_id + 1
        while self.waiting and self.free_slots and self.rng.random() < 0.7:
            self._admit(plan, self.waiting.popleft())
        budget = self.runner.buffers.max_num_tokens
        rows: list[tuple[ScheduledRow, Job]] = []
        for job in self.running:
            row = self._row(job, budget)
            if row is not None and self.rng.random() < 0.9:
                self._grow(plan, job, row)
                budget -= row.num_tokens
                job.computed += row.num_tokens
                job.in_flight += 1
                rows.append((row, job))
        rows.sort(key=lambda pair: (pair[0].num_draft_tokens == 0, pair[0].is_prefill))
        plan.rows = [row for row, _ in rows]
        return plan, [(job, job.incarnation) for _, job in rows]

    def _admit(self, plan: StepPlan, job: Job) -> None:
        job.slot = self.free_slots.pop(self.rng.randrange(len(self.free_slots)))
        job.prefill_len, job.computed = len(job.tokens), 0
        plan.new_requests.append(
            NewRequest(job.slot, list(job.tokens), job.prompt_len, 0, [[]], job.sampling)
        )
        self.running.append(job)

    def _row(self, job: Job, budget: int) -> ScheduledRow | None:
        assert job.slot is not None
        outputs = len(job.tokens) - job.prompt_len
        if job.computed < job.prefill_len:
            left = job.prefill_len - job.computed
            count = min(left, self.rng.randint(1, self.max_chunk), budget)
            if count <= 0:
                return None
            return ScheduledRow(job.slot, count, 0, job.computed, count < left, outputs)
        count = min(self.num_drafts + 1, MAX_LEN - job.computed, budget)
        if count <= 0:
            return None
        return ScheduledRow(job.slot, count, count - 1, job.computed, False, outputs)

    def _grow(self, plan: StepPlan, job: Job, row: ScheduledRow) -> None:
        need = -(-(job.computed + row.num_tokens) // BLOCK) - len(job.blocks)
        fresh = [
            self.free_blocks.pop(self.rng.randrange(len(self.free_blocks))) for _ in range(need)
        ]
        job.blocks += fresh
        new = [new for new in plan.new_requests if new.slot == row.slot]
        if new:
            new[0].block_ids[0] += fresh
        elif fresh:
            plan.new_blocks.append(NewBlocks(row.slot, [fresh]))

    def _release(self, job: Job) -> None:
        assert job.slot is not None
        self.running.remove(job)
        self.freed.append(job.slot)
        self.free_slots.append(job.slot)
        self.free_blocks += job.blocks
        job.slot, job.blocks = None, []

    # --- results ----------------------------------------------------------------------------------

    def _land(self, flight: Flight) -> None:
        results: list[RowResult] = flight.handle.get()
        assert len(results) == len(flight.plan.rows)
        for row, (job, incarnation), result in zip(
            flight.plan.rows, flight.jobs, results, strict=True
        ):
            assert not result.has_nan
            job.in_flight -= 1
            if job.slot is None or job.incarnation != incarnation:
                continue  # stale
            assert bool(result.token_ids) != row.is_prefill
            if row.is_prefill:
                continue
            assert len(result.token_ids) <= result.num_draft_tokens + 1
            job.draft_counts.append(result.num_draft_tokens)
            job.computed -= 1 + row.num_draft_tokens - len(result.token_ids)
            if self.oracle is not None:
                expected = self.oracle.continuation(job.tokens, len(result.token_ids))
                assert result.token_ids == expected, f"after {job.tokens}"
            job.tokens += result.token_ids
            if len(job.tokens) >= min(job.wanted, MAX_LEN):
                self._release(job)
                self.done.append(job)
