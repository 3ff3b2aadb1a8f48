"""An engine whose K and acceptance are at hand, and what its steps brought.

Acceptance is by chance, at rates that change while it runs; K is held, or chosen by a controller
that has seen nothing.
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
from slipstream.runner.engine.engine import join
from slipstream.runner.engine.worker import tune_garbage_collector
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams
from slipstream.runner.startup.compile_ahead import start_ahead
from slipstream.speculators.draft_length.controller import DraftController
from slipstream.speculators.draft_length.step_costs import StepCosts

Rates = tuple[float, ...]


def brought(rates: Rates, num_drafts: float) -> float:
    """Tokens that a request gets on the average from a step that verifies so many drafts."""
    return float(np.interp(num_drafts, range(len(rates) + 1), 1 + np.cumsum((0.0, *rates))))


@dataclass
class Phase:
    """Steps under the same rates."""

    rates: Rates
    seconds: float = 0.0
    expected: float = 0.0  # tokens that these steps bring on the average
    tokens: int = 0  # that came
    drafts: Counter[int] = field(default_factory=Counter)  # K -> rows that verified so many
    steps: list[float] = field(default_factory=list)  # seconds of each

    def add(self, seconds: float, stats: Any) -> None:
        """One step that landed `seconds` after the one before."""
        k = stats.num_draft_tokens / stats.num_drafts if stats.num_drafts else 0.0
        self.seconds += seconds
        self.steps.append(seconds)
        self.expected += stats.num_plain_steps + stats.num_drafts * brought(self.rates, k)
        self.tokens += stats.num_generated_tokens
        self.drafts[0] += stats.num_plain_steps
        self.drafts[round(k)] += stats.num_drafts

    @property
    def speed(self) -> float:
        return self.expected / self.seconds


def joined(speeds: Sequence[float]) -> float:
    """The speed of phases that bring equally many tokens each."""
    return len(speeds) / sum(1 / speed for speed in speeds)


class HeldEngine:
    """One engine whose K and acceptance are at hand."""

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
        """New requests, whose prompts are computed."""
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
        """Abort them."""
        self._engine.handle([AbortRequests(names)])
        while self._engine.has_work():
            self._engine.step()

    def set_rates(self, rates: Rates) -> None:
        """Accept by these from the next step on."""
        self._runner.sampling.sampler.verify.set_rates(rates)

    def forget(self) -> None:
        """The controller as after the start."""
        self.controller.hold(None)
        self.controller.new_drafter()
        is_trusted = not self._runner.facts.device.startswith("cpu")
        self.controller.costs = StepCosts(self.measured, self.counts[-1], is_trusted)

    def steps(self) -> Iterator[tuple[float, Any]]:
        """(seconds since the one before, statistics) of every step, as it lands."""
        while True:
            for step in self._engine.step():
                for output in step.outputs:
                    assert output.error is None and output.finish_reason is None, output
                if step.stats.num_drafts + step.stats.num_plain_steps:
                    before, self._landed = self._landed, time.perf_counter()
                    yield self._landed - before, step.stats

    def run(self, rates: Rates, tokens: float = 0.0, num_steps: int = 0) -> Phase:
        """Steps until they bring so many tokens, or so many of them."""
        if self._drafts is not None:
            self.set_rates(rates)
        phase = Phase(rates)
        for seconds, stats in self.steps():
            phase.add(seconds, stats)
            if phase.expected >= tokens and len(phase.steps) >= num_steps:
                return phase
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._engine.shutdown()
