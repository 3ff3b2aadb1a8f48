"""An engine with controlled draft length K and acceptance, for `measure_controller.py`.

Drafts are accepted at random, at rates that can be changed while the engine runs. K is held fixed,
or chosen by a draft-length controller that has no history.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.configs.schema import Config
from slipstream.kernels.compile_log import watch_compilations
from slipstream.runner.engine.engine import join
from slipstream.runner.engine.worker import tune_garbage_collector
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams
from slipstream.runner.startup.compile_ahead import start_ahead
from slipstream.speculators.draft_length.controller import DraftController
from slipstream.speculators.draft_length.step_costs import StepCosts

Rates = tuple[float, ...]
_IN_FLIGHT = 2  # steps of the engine


def expected_tokens(rates: Rates, num_drafts: float) -> float:
    """The mean number of tokens per request from a step that verifies `num_drafts` drafts.

    `rates` are the unconditional acceptance rates by position; between integers it interpolates.
    """
    return float(np.interp(num_drafts, range(len(rates) + 1), 1 + np.cumsum((0.0, *rates))))


@dataclass
class Phase:
    """A series of steps with the same acceptance rates, and its sums."""

    rates: Rates
    seconds: float = 0.0
    expected: float = 0.0  # mean number of tokens that these steps yield at these rates
    tokens: int = 0  # number of tokens that they yielded
    drafts: Counter[int] = field(default_factory=Counter)  # K -> batch rows that verified K drafts
    steps: list[float] = field(default_factory=list)  # seconds of each step

    def add(self, seconds: float, stats: Any) -> None:
        """Add a step whose results came `seconds` after those of the previous step."""
        k = stats.num_draft_tokens / stats.num_drafts if stats.num_drafts else 0.0
        self.seconds += seconds
        self.steps.append(seconds)
        self.expected += stats.num_plain_steps + stats.num_drafts * expected_tokens(self.rates, k)
        self.tokens += stats.num_generated_tokens
        self.drafts[0] += stats.num_plain_steps
        self.drafts[round(k)] += stats.num_drafts

    @property
    def speed(self) -> float:
        """Expected tokens per second, for the whole batch."""
        return self.expected / self.seconds


def mean_speed(speeds: Sequence[float]) -> float:
    """The speed over several phases with equal numbers of tokens: their harmonic mean."""
    return len(speeds) / sum(1 / speed for speed in speeds)


class HeldEngine:
    """An engine with controlled acceptance rates; `controller.hold` fixes its K."""

    def __init__(self, config: Config) -> None:
        from slipstream.runner.startup.build import build_model_runner

        with start_ahead(config) as ahead:
            self._runner = build_model_runner(config, lambda _: None, ahead)
        self._engine = join(self._runner, config)
        self._drafts = self._engine.drafts
        self.counts = (0, *config.speculative.draft_counts)
        self.measured = dict(self._runner.facts.step_seconds)
        self._landed = self._tick = 0.0
        self._num_sets = 0
        tune_garbage_collector()

    @property
    def controller(self) -> DraftController:
        assert self._drafts is not None
        return self._drafts.controller

    def begin(self, batch: int, prompt_len: int, rates: Rates) -> list[str]:
        """Start `batch` requests and compute their prompts; returns their names."""
        if self._drafts is not None:
            self.set_rates(rates)
        self._num_sets += 1
        draw, most = random.Random(self._num_sets), self._engine.ready.vocab_size - 10
        room = self._engine.ready.max_model_len - prompt_len
        names = [f"{self._num_sets}-{index}" for index in range(batch)]
        self._engine.handle(
            [
                AddRequest(
                    name,
                    [draw.randrange(10, most) for _ in range(prompt_len)],
                    SamplingParams(seed=index, max_tokens=room, temperature=0.0),
                )
                for index, name in enumerate(names)
            ]
        )
        waiting = set(names)
        while waiting:
            for step in self._engine.step():
                for output in step.outputs:
                    assert output.error is None and output.finish_reason is None, output
                waiting -= {output.request_id for output in step.outputs if output.token_ids}
        self._landed = time.perf_counter()
        return names

    def end(self, names: list[str]) -> None:
        """Abort requests and run the engine until it is idle."""
        self._engine.handle([AbortRequests(names)])
        while self._engine.has_work():
            self._engine.step()

    def set_rates(self, rates: Rates) -> None:
        """Accept drafts at these rates from the next step on."""
        self._runner.sampling.sampler.verify.set_rates(rates)

    def forget(self) -> None:
        """Reset the controller to its state after start-up."""
        self.controller.hold(None)
        self.controller.new_drafter()
        is_trusted = not self._runner.facts.device.startswith("cpu")
        self.controller.costs = StepCosts(self.measured, self.counts[-1], is_trusted)

    def steps(self) -> Iterator[tuple[float, Any]]:
        """Run steps; yields (seconds since the previous results, statistics) for each."""
        while True:
            for step in self._engine.step():
                for output in step.outputs:
                    assert output.error is None and output.finish_reason is None, output
                if step.stats.num_drafts + step.stats.num_plain_steps:
                    before, self._landed = self._landed, time.perf_counter()
                    yield self._landed - before, step.stats

    def run(self, rates: Rates, tokens: float = 0.0, num_steps: int = 0) -> Phase:
        """Run steps until they have yielded `tokens` expected tokens and number `num_steps`.

        Steps during which a kernel was compiled are not counted, nor are those in flight after
        them: a start should have compiled it, but no K is to blame. Prints the kernel's name.
        """
        if self._drafts is not None:
            self.set_rates(rates)
        phase, left_out = Phase(rates), 0
        log = watch_compilations()
        known = len(log.compiled)
        for seconds, stats in self.steps():
            if len(log.compiled) > known:
                names = ", ".join(log.compiled[known:])
                print(f"NOT COUNTED: a step of {1e3 * seconds:.0f} ms that compiled {names}")
                known, left_out = len(log.compiled), _IN_FLIGHT
            if left_out:
                left_out -= 1
                continue
            phase.add(seconds, stats)
            if phase.expected >= tokens and len(phase.steps) >= num_steps:
                return phase
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._engine.shutdown()
