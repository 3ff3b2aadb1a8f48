"""Measures at start-up what a step takes, by its number of requests and of drafts.

It runs whole steps of made-up requests through the model runner, graphs, sampling and drafting
included. Their KV goes to blocks that nobody owns yet; afterwards their rows are free again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..configs.schema import Config
from .messages import SamplingParams
from .plan import NewRequest, ScheduledRow, StepPlan

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_GPU_SECONDS, _CPU_SECONDS = 2.0, 1.2
_ALWAYS = 2  # cells that are measured however long they take
_GPU_STEPS, _CPU_STEPS = 3, 1  # timed steps of a cell, after one that is not
_PROMPT_LEN = 8


class TimedRunner(Protocol):
    """What is used of a model runner."""

    @property
    def facts(self) -> Any: ...

    def execute(self, plan: StepPlan) -> Any: ...

    def fill_drafts(self, num_slots: int, num_drafts: int) -> None: ...

    def synchronize(self) -> None: ...


def measure_steps(runner: TimedRunner, config: Config) -> dict[tuple[int, int], float]:
    """(requests, drafts each) -> seconds, for as many pairs as fit into a bounded time."""
    on_cpu = runner.facts.device == "cpu"
    deadline = time.monotonic() + (_CPU_SECONDS if on_cpu else _GPU_SECONDS)
    bench = _Bench(runner, _CPU_STEPS if on_cpu else _GPU_STEPS)
    most = config.scheduler.max_num_seqs
    found: dict[tuple[int, int], float] = {}
    last = 0.0  # seconds that the last cell took
    for num_reqs, num_drafts in _cells(most, (0, *config.speculative.draft_counts), on_cpu):
        tokens = num_reqs * (num_drafts + 1)
        if tokens > config.scheduler.max_num_batched_tokens or not bench.fits(num_drafts):
            continue
        if len(found) >= _ALWAYS and time.monotonic() + last > deadline:
            break
        start = time.monotonic()
        found[num_reqs, num_drafts] = bench.measure(num_reqs, num_drafts)
        last = time.monotonic() - start
    return found


def _cells(most: int, counts: Sequence[int], on_cpu: bool) -> Iterator[tuple[int, int]]:
    """What to measure, the most telling first: the ends, then what lies between."""
    sizes = [size for size in _SIZES if size < most] + [most]
    if on_cpu:  # a full step takes a second
        sizes = [size for size in sizes if size in (1, 8)] or sizes[:1]
        ends = (0, counts[-1])
        between = dict.fromkeys(c for c in (counts[1], counts[len(counts) // 2]) if c not in ends)
        yield from ((size, count) for some in (ends, between) for size in sizes for count in some)
        return
    for size in sizes:
        for count in counts:
            yield size, count


class _Bench:
    """Runs made-up requests in the first slots."""

    def __init__(self, runner: TimedRunner, num_steps: int) -> None:
        self._runner, self._num_steps = runner, num_steps
        self._step_id = -1  # no step of a scheduler has a negative id

    def _length(self, num_drafts: int) -> int:
        """Tokens that a request may come to, its drafts' KV included."""
        lookahead: int = self._runner.facts.needs.num_lookahead_tokens
        return _PROMPT_LEN + (self._num_steps + 3) * (num_drafts + 1) + lookahead

    def fits(self, num_drafts: int) -> bool:
        """Whether such requests fit into the context and the KV cache."""
        facts, length = self._runner.facts, self._length(num_drafts)
        blocks = all(group.num_blocks > -(-length // group.block_size) for group in facts.kv_groups)
        return length < facts.max_model_len and blocks

    def measure(self, num_reqs: int, num_drafts: int) -> float:
        """Seconds of a step."""
        runner = self._runner
        self._run(num_reqs, 0, num_drafts, self._new_requests(num_reqs, num_drafts))
        self._run(num_reqs, num_drafts, num_drafts)  # compiles and allocates what is missing
        seconds = []
        for _ in range(self._num_steps):
            runner.fill_drafts(num_reqs, num_drafts)
            runner.synchronize()
            start = time.perf_counter()
            self._run(num_reqs, num_drafts, num_drafts)
            runner.synchronize()
            seconds.append(time.perf_counter() - start)
        runner.execute(StepPlan(self._next_id(), freed_slots=list(range(num_reqs)))).get()
        return min(seconds)

    def _new_requests(self, num_reqs: int, num_drafts: int) -> list[NewRequest]:
        """All use the same blocks: what they compute is of no interest."""
        length = self._length(num_drafts)
        blocks = [
            list(range(1, 1 - (-length // group.block_size)))
            for group in self._runner.facts.kv_groups
        ]
        sampling = SamplingParams(seed=0, max_tokens=length, temperature=0.0)
        self._bound = _PROMPT_LEN - 1
        return [
            NewRequest(slot, [0] * _PROMPT_LEN, _PROMPT_LEN, _PROMPT_LEN - 1, blocks, sampling)
            for slot in range(num_reqs)
        ]

    def _run(
        self,
        num_reqs: int,
        verified: int,
        drafted: int,
        new_requests: Sequence[NewRequest] = (),
    ) -> None:
        rows = [
            ScheduledRow(slot, verified + 1, verified, self._bound, False, self._bound)
            for slot in range(num_reqs)
        ]
        self._bound += verified + 1
        plan = StepPlan(self._next_id(), new_requests=list(new_requests), rows=rows)
        plan.num_drafts = drafted
        plan.defers_drafter = not drafted and not verified
        self._runner.execute(plan).get()

    def _next_id(self) -> int:
        self._step_id -= 1
        return self._step_id
