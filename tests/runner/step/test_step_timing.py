"""Which steps are timed at start-up, and that nothing runs once the time is over."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from slipstream.configs.schema import Config, SpeculativeConfig, StepLimits
from slipstream.runner.scheduling.plan import StepPlan
from slipstream.runner.step import step_timing
from slipstream.runner.step.step_timing import measure_steps


class SlowRunner:
    """Every step takes as long by the clock that `step_timing` looks at, and is noted."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, max_num_tokens: int = 64
    ) -> None:
        self.now, self._seconds = 0.0, seconds
        self.stalls: dict[int, float] = {}  # by step: seconds of other work meanwhile
        self.plans: list[StepPlan] = []
        self.facts = SimpleNamespace(
            device="cuda",
            needs=SimpleNamespace(num_lookahead_tokens=3),
            kv_groups=[SimpleNamespace(num_blocks=100, block_size=16)],
            max_model_len=1000,
            vocab_size=50,
            limits=StepLimits(8, max_num_tokens),
            has_experts=False,
            state_group=None,
        )
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(step_timing, "time", clock)

    def execute(self, plan: StepPlan) -> SimpleNamespace:
        self.plans.append(plan)
        self.now += self._seconds + self.stalls.get(len(self.plans), 0.0)
        return SimpleNamespace(get=lambda: [])

    def fill_tokens(self, num_slots: int, num_drafts: int) -> None:
        """Nothing reads them."""

    def synchronize(self) -> None:
        """Every step has ended."""


CONFIG = Config(speculative=SpeculativeConfig("eagle3", "head", num_speculative_tokens=3))


def started(runner: SlowRunner) -> list[int]:
    """Of which sizes requests were started, in order."""
    return [len(plan.new_requests) for plan in runner.plans if plan.new_requests]


@pytest.mark.parametrize(
    ("seconds", "sizes", "cells"),
    [
        (10.0, [1], [(1, 0), (1, 3)]),  # some are measured however long they take
        (0.15, [1, 8], [(1, 0), (1, 3), (8, 0)]),  # over within a size
        (0.25, [1], [(1, 0), (1, 3)]),  # over with a size
        (0.001, [1, 8, 4, 2], [(n, k) for n in (1, 8, 4, 2) for k in (0, 3)]),
    ],
)
def test_no_requests_are_started_once_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sizes: list[int], cells: list[tuple[int, int]]
) -> None:
    runner = SlowRunner(monkeypatch, seconds)
    found = measure_steps(runner, CONFIG)
    assert list(found) == cells
    assert all(each == pytest.approx(seconds) for each in found.values())
    assert started(runner) == sizes
    assert [plan.freed_slots for plan in runner.plans if plan.freed_slots] == [
        list(range(size)) for size in sizes
    ]


def test_a_stall_or_a_slow_first_step_of_a_cell_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = SlowRunner(monkeypatch, 0.001)
    per_size = 1 + 2 * 5 + 1  # the prompts, five steps for each K, and the end of the requests
    for size in range(4):
        runner.stalls[size * per_size + 2] = 0.5  # the first step compiles something
        runner.stalls[size * per_size + 9 + size % 2] = 0.02
    assert list(measure_steps(runner, CONFIG).values()) == pytest.approx([0.001] * 8)


def test_a_size_of_which_no_step_fits_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SlowRunner(monkeypatch, 0.001, max_num_tokens=7)
    found = measure_steps(runner, CONFIG)
    assert list(found) == [(1, 0), (1, 3), (4, 0), (2, 0)] and started(runner) == [1, 4, 2]


@pytest.mark.parametrize(("num_blocks", "num_contexts"), [(100, 8), (30, 5)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_requests_of_a_model_with_experts_have_contexts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, recurrent: bool, num_blocks: int, num_contexts: int
) -> None:
    """They share blocks only if the cache is too small, and compute a context only once if blocks
    keep all of it."""
    runner = SlowRunner(monkeypatch, 0.001)
    runner.facts.has_experts = True
    runner.facts.state_group = object() if recurrent else None
    runner.facts.kv_groups = [SimpleNamespace(num_blocks=num_blocks, block_size=16)]
    measure_steps(runner, CONFIG)
    entries = [plan for plan in runner.plans if plan.new_requests]
    assert all(sum(row.num_tokens for row in plan.rows) <= 64 for plan in entries)
    assert len(entries) == (8 if recurrent else 7)  # no more than needed
    new = [request for plan in entries for request in plan.new_requests]
    assert [request.slot for request in new] == [0, *range(8), *range(4), *range(2)]
    blocks = {request.slot: tuple(request.block_ids[0]) for request in new}
    assert len(set(blocks.values())) == num_contexts == len({each[0] for each in blocks.values()})
    assert all(1 <= min(each) and max(each) < num_blocks for each in blocks.values())
    used = [block for each in set(blocks.values()) for block in each]
    assert len(used) == len(set(used))
    computed = [request.slot for request in new if not request.num_computed_tokens]
    again = [*range(8), *range(4), *range(2)] if recurrent else range(1, 8)
    assert computed == [0, *again]


class Members:
    """This engine and another one that shares its experts."""

    rank = 0

    def __init__(self, of_other: int) -> None:
        self._of_other = of_other

    def least(self, values: Sequence[int]) -> list[int]:
        return [min(value, self._of_other) for value in values]


def test_engines_end_with_the_first_whose_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SlowRunner(monkeypatch, 0.001)
    assert measure_steps(runner, CONFIG, Members(-1)) == {} and not runner.plans
    assert len(measure_steps(runner, CONFIG, Members(0))) == 8


@pytest.mark.parametrize("engines", [None, Members(0)])
def test_steps_follow_each_other_as_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, engines: Members | None
) -> None:
    """Their tokens are counted as if all drafts were accepted. Without drafts they defer the
    drafter, unless other engines' passes of it need this one's."""
    runner = SlowRunner(monkeypatch, 10.0)
    measure_steps(runner, CONFIG, engines)
    prompt, *steps = [plan for plan in runner.plans if plan.rows]
    at = prompt.rows[0].num_computed_tokens + prompt.rows[0].num_tokens
    for plan in steps[:10]:
        (row,) = plan.rows
        assert row.num_computed_tokens == row.num_output_tokens == at
        assert row.num_tokens == plan.num_drafts + 1
        at += row.num_tokens
        assert plan.defers_drafter == (engines is None and not plan.num_drafts)
    assert [plan.num_drafts for plan in steps[:10]] == [0] * 5 + [3] * 5
