"""Measures the duration of a step at start-up, by its numbers of requests and of drafts.

It runs whole steps of dummy requests through the model runner, including graphs, sampling and
drafting. A model with experts reads those of each token, so its requests must choose as many as
real ones. Different tokens alone do not suffice: attention makes the rows of one context alike, and
rows that are alike choose the same experts. So each of its requests has a context of its own. The
KV goes to blocks that no request owns yet; afterwards the slots are free again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from ...configs.schema import Config
from ..messages import SamplingParams
from ..parallel.ranks import HasLeast
from ..scheduling.plan import NewRequest, ScheduledRow, StepPlan
from .warm_up import SteppedRunner, different_tokens, request_fits

_SIZES = (1, 256, 16, 64, 4, 128, 8, 32, 2, 512)  # in this order, so that interpolation is good
_CPU_SIZES = (1, 8)  # a step of many requests takes a second
_GPU_SECONDS, _CPU_SECONDS = 3.0, 1.2
_ALWAYS = 2  # cells that are measured even if that takes too long
_GPU_STEPS, _CPU_STEPS = 5, 2  # steps of a cell; the first one may compile and allocate
_GPU_IN_FLIGHT, _CPU_IN_FLIGHT = 2, 1  # steps, as in the engine; a CPU computes one at a time
_PROMPT_LEN = 8
# In a longer context the drafts of a request choose fewer experts, as they are more alike. With
# this many tokens they choose as many as with hundreds.
_EXPERTS_PROMPT_LEN = 32


class TimedRunner(SteppedRunner, Protocol):
    """The part of a model runner that is used here."""

    def synchronize(self) -> None: ...


def measure_steps(
    runner: TimedRunner, config: Config, engines: HasLeast | None = None
) -> dict[tuple[int, int], float]:
    """Returns (requests, drafts of each) -> seconds of a step, for the cells that can be measured
    within a few seconds."""
    on_cpu = runner.facts.device == "cpu"
    deadline = time.monotonic() + (_CPU_SECONDS if on_cpu else _GPU_SECONDS)
    counts = (0, *config.speculative.draft_counts)
    limits = runner.facts.limits
    prompt_len = _PROMPT_LEN if on_cpu or not runner.facts.has_experts else _EXPERTS_PROMPT_LEN
    prompt_len = min(prompt_len, limits.max_num_batched_tokens)
    steps = (_CPU_STEPS, _CPU_IN_FLIGHT) if on_cpu else (_GPU_STEPS, _GPU_IN_FLIGHT)
    bench = _Bench(runner, steps, counts, prompt_len, engines is None)
    found: dict[tuple[int, int], float] = {}
    if not request_fits(runner.facts, bench.num_tokens):
        return found
    last = 0.0  # seconds for the last cell

    def is_over() -> bool:
        over = len(found) >= _ALWAYS and time.monotonic() + last > deadline
        return over if engines is None else engines.least([-over])[0] < 0

    for num_reqs, some in _cells(limits.max_num_seqs, counts, on_cpu):
        some = [k for k in some if num_reqs * (k + 1) <= limits.max_num_batched_tokens]
        if not some or is_over():
            continue
        with bench.requests(num_reqs):
            for num_drafts in some:
                if is_over():
                    return found
                start = time.monotonic()
                found[num_reqs, num_drafts] = bench.measure(num_reqs, num_drafts)
                last = time.monotonic() - start
    return found


def _cells(most: int, counts: Sequence[int], on_cpu: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """The cells to measure, in order of their use for interpolation: a number of requests and its
    numbers of drafts."""
    sizes = [size for size in (_CPU_SIZES if on_cpu else _SIZES) if size < most]
    if not on_cpu:
        sizes.insert(1, most)
        yield from ((size, counts) for size in sizes)
        return
    sizes = sizes or [most]
    ends = (0, counts[-1])
    between = dict.fromkeys(k for k in (counts[1], counts[len(counts) // 2]) if k not in ends)
    yield from ((size, some) for some in (ends, tuple(between)) for size in sizes)


class _Bench:
    """Runs dummy requests in the first slots."""

    def __init__(
        self,
        runner: TimedRunner,
        steps: tuple[int, int],
        counts: Sequence[int],
        prompt_len: int,
        may_defer: bool,
    ) -> None:
        """`steps`: of a cell, and how many of them are in flight; `may_defer`: as in
        `DraftPlanner`."""
        self._runner, self._may_defer = runner, may_defer
        self._num_steps, self._in_flight = steps
        self._prompt_len = prompt_len
        self._step_id = -1  # negative, unlike the ids of the scheduler's steps
        self._num_contexts = 0  # of the first slots, whose prompts their blocks hold
        lookahead: int = runner.facts.needs.num_lookahead_tokens
        rows = (self._num_steps + 1) * sum(count + 1 for count in counts)
        # The most tokens of a request, including KV slots of drafts.
        self.num_tokens = prompt_len + rows + counts[-1] + 1 + lookahead

    @contextmanager
    def requests(self, num_reqs: int) -> Iterator[None]:
        """A context with `num_reqs` requests that have finished their prompts."""
        facts, known = self._runner.facts, self._prompt_len - 1
        sampling = SamplingParams(seed=0, max_tokens=self.num_tokens, temperature=0.0)
        tokens = different_tokens(num_reqs * self._prompt_len, facts.vocab_size)
        # Without experts the contents of a context do not matter.
        num_ready = self._num_contexts if facts.has_experts else num_reqs
        new = [
            NewRequest(
                slot,
                tokens[slot::num_reqs],
                self._prompt_len,
                known if slot < num_ready else 0,  # as if the prefix cache held them
                self._blocks(slot),
                sampling,
            )
            for slot in range(num_reqs)
        ]
        for plan in self._prompts(new):
            self._runner.execute(plan).get()
        if facts.state_group is None:  # recurrent states are not in blocks
            self._num_contexts = max(self._num_contexts, num_reqs)
        self._bound = self._prompt_len
        try:
            yield
        finally:
            freed = StepPlan(self._next_id(), freed_slots=list(range(num_reqs)))
            self._runner.execute(freed).get()

    def _blocks(self, slot: int) -> list[list[int]]:
        """A request's blocks by KV group: its own, as long as there are some.

        Without experts all requests use the same blocks, so that the start touches no more memory.
        """
        blocks = []
        for group in self._runner.facts.kv_groups:
            count = -(-self.num_tokens // group.block_size)
            room = (group.num_blocks - 1) // count if self._runner.facts.has_experts else 1
            first = 1 + slot % room * count
            blocks.append(list(range(first, first + count)))
        return blocks

    def _prompts(self, new: Sequence[NewRequest]) -> Iterator[StepPlan]:
        """Steps that compute the rest of all prompts; each computes as many as it has room for."""
        budget, first, total = self._runner.facts.limits.max_num_batched_tokens, 0, 0
        for at, request in enumerate(new):
            rest = self._prompt_len - request.num_computed_tokens
            if total + rest > budget:
                yield self._entry(new[first:at])
                first, total = at, 0
            total += rest
        yield self._entry(new[first:])

    def _entry(self, new: Sequence[NewRequest]) -> StepPlan:
        """A step that computes the rest of these prompts."""
        known = [request.num_computed_tokens for request in new]
        rows = [
            ScheduledRow(request.slot, self._prompt_len - count, 0, count, False, 0)
            for request, count in zip(new, known, strict=True)
        ]
        return StepPlan(self._next_id(), new_requests=list(new), rows=rows)

    def measure(self, num_reqs: int, num_drafts: int) -> float:
        """Seconds of a step, while the next one is prepared as in the engine.

        The median of the times between results, so that one disturbance does not count.
        """
        self._runner.synchronize()
        running: list[Any] = []
        landed: list[float] = []

        def land() -> None:
            running.pop(0).get()
            landed.append(time.perf_counter())

        for _ in range(self._num_steps):
            self._runner.fill_tokens(num_reqs, num_drafts)  # whatever the drafter has found
            if len(running) == self._in_flight:
                land()
            running.append(self._runner.execute(self._decode(num_reqs, num_drafts)))
        land()
        for step in running:  # nothing is prepared meanwhile, so their times say nothing
            step.get()
        self._runner.synchronize()
        return median(after - before for before, after in pairwise(landed))

    def _decode(self, num_reqs: int, num_drafts: int) -> StepPlan:
        """A step that verifies and makes so many drafts of each request."""
        rows = [
            ScheduledRow(slot, num_drafts + 1, num_drafts, self._bound, False, self._bound)
            for slot in range(num_reqs)
        ]
        self._bound += num_drafts + 1
        plan = StepPlan(self._next_id(), rows=rows)
        plan.num_drafts = num_drafts
        plan.defers_drafter = self._may_defer and not num_drafts
        return plan

    def _next_id(self) -> int:
        self._step_id -= 1
        return self._step_id
