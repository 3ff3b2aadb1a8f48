"""The drafts in a plan, and what the draft planner learns from results. No tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from slipstream.configs.graphs import CUDAGraphMode
from slipstream.configs.schema import SpeculativeConfig
from slipstream.configs.speculative import MAX_DRAFTS
from slipstream.runner.graphs.dispatch import default_capture_sizes, descriptors
from slipstream.runner.messages import SamplingParams, StepStats
from slipstream.runner.scheduling.draft_planner import DraftPlanner
from slipstream.runner.scheduling.plan import NewRequest, RowResult, ScheduledRow, StepPlan
from slipstream.runner.step.drafting import _most_drafts
from slipstream.speculators.draft_length.controller import DraftController, DraftLength
from slipstream.speculators.draft_length.step_costs import StepCosts
from slipstream.speculators.draft_length.watchdog import Watchdog

K = 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Script(DraftController):
    """A controller that makes scripted choices and records its inputs."""

    def __init__(self) -> None:
        super().__init__((1, 2, K), 4, StepCosts({(1, k): 1.0 + k for k in range(K + 1)}, K))
        self.next = DraftLength(0, "no_gain")
        self.prompt_rows: list[float] = []
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def choose(self, slots: Sequence[int], num_prompt_rows: float = 0.0) -> DraftLength:
        self.prompt_rows.append(num_prompt_rows)
        return self.next

    def observe(
        self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self.seen.append((list(slots), list(drafted), list(accepted)))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def planner(script: Script, clock: Clock) -> DraftPlanner:
    return DraftPlanner(script, 4, max_deferred_tokens=5, trims=False, clock=clock)


def row(
    slot: int, drafts: int = 0, tokens: int | None = None, prefill: bool = False
) -> ScheduledRow:
    count = drafts + 1 if tokens is None else tokens
    return ScheduledRow(slot, count, drafts, 10, prefill, 0)


def enter(slot: int) -> NewRequest:
    return NewRequest(slot, [1] * 10, 10, 0, [[1]], SamplingParams(seed=0, max_tokens=9))


def test_plain_steps_are_deferred_until_the_limit(planner: DraftPlanner, script: Script) -> None:
    states = []
    for step in range(7):
        plan = StepPlan(step, rows=[row(0), row(1)])
        assert planner.complete(plan) == 0
        states.append((plan.defers_drafter, plan.rows[0].num_deferred, plan.rows[0].num_behind))
    assert states == [*((True, n, n + 1) for n in range(5)), (False, 5, 0), (True, 0, 1)]
    script.next = DraftLength(2, "gain")
    plan = StepPlan(7, rows=[row(0), row(2)])
    assert planner.complete(plan) == 2
    assert [r.num_deferred for r in plan.rows] == [1, 0] and not plan.defers_drafter
    assert all(r.num_behind == 0 for r in plan.rows)
    script.next = DraftLength(0, "no_gain")
    plan = StepPlan(8, new_requests=[enter(1)], rows=[row(1)])
    planner.complete(plan)
    assert plan.rows[0].num_deferred == 0  # slot 1 was two steps behind: another request's


def test_a_request_that_sits_out_steps_with_drafts_is_still_behind(
    planner: DraftPlanner, script: Script
) -> None:
    planner.complete(StepPlan(0, rows=[row(0), row(1)]))
    script.next = DraftLength(2, "gain")
    for step, slot, num_deferred in ((1, 0, 1), (2, 0, 0), (3, 1, 1), (4, 1, 0)):
        plan = StepPlan(step, rows=[row(slot)])
        planner.complete(plan)
        assert plan.rows[0].num_deferred == num_deferred


@pytest.mark.parametrize("rows", [[row(0, drafts=2)], [row(0), row(1, tokens=8, prefill=True)]])
def test_steps_with_counts_unknown_to_the_host_are_not_deferred(
    planner: DraftPlanner, rows: list[ScheduledRow]
) -> None:
    plan = StepPlan(0, rows=rows)
    planner.complete(plan)
    assert plan.num_drafts == 0 and not plan.defers_drafter


def test_a_drafter_without_state_is_never_behind(script: Script) -> None:
    planner = DraftPlanner(script, 4, max_deferred_tokens=0, trims=False)
    plan = StepPlan(0, rows=[row(0), row(1, tokens=8, prefill=True)])
    planner.complete(plan)
    assert plan.defers_drafter and [r.num_behind for r in plan.rows] == [0, 0]


@pytest.mark.parametrize("max_deferred", [0, 5])
def test_where_other_ranks_wait_for_the_drafters_passes_none_is_deferred(
    script: Script, max_deferred: int
) -> None:
    planner = DraftPlanner(script, 4, max_deferred, trims=False, may_defer=False)
    plan = StepPlan(0, rows=[row(0)])
    planner.complete(plan)
    assert plan.num_drafts == 0 and not plan.defers_drafter and plan.rows[0].num_behind == 0


def test_a_step_of_prompts_alone_leaves_older_drafts_to_be_verified(
    planner: DraftPlanner, script: Script
) -> None:
    script.next = DraftLength(K, "gain")
    assert planner.complete(StepPlan(0, rows=[row(0)])) == K
    script.next = DraftLength(0, "requests")
    plan = StepPlan(1, rows=[row(1, tokens=8, prefill=True)])
    assert planner.complete(plan) == K and plan.num_drafts == 0


def test_results_update_acceptance_of_their_request_and_step_costs(
    planner: DraftPlanner, script: Script, clock: Clock
) -> None:
    plans = [StepPlan(step, rows=[row(0, drafts=2), row(1, drafts=2)]) for step in range(3)]
    plans[1].new_requests = [enter(1)]
    for plan in plans:
        planner.complete(plan)
    results = [RowResult([5, 6], 2), RowResult([7], 0)]
    before = script.costs.seconds(2, 2)
    planner.land(plans[0], results, list)
    assert script.seen == [([0], [2], [1])]  # slot 1 has another request by now
    clock.now = 20.0
    planner.land(plans[1], results, list)
    assert script.seen[1] == ([0, 1], [2, 2], [1, 0])  # a missing draft is a wrong one
    slower = script.costs.seconds(2, 2)
    assert slower > before
    planner.rest()
    clock.now = 1000.0
    planner.land(plans[2], results, list)
    assert script.costs.seconds(2, 2) == slower  # the engine slept


def test_a_fixed_k_needs_no_knowledge_of_steps_but_a_watchdog(clock: Clock) -> None:
    costs = StepCosts({(1, k): 1.0 + k for k in range(K + 1)}, K)
    watchdog = Watchdog("eagle3", clock)
    controller = DraftController((K,), 4, costs, watchdog=watchdog)
    planner = DraftPlanner(
        controller, 4, max_deferred_tokens=5, trims=False, clock=clock, learns=False
    )
    for step in range(70):
        plan = StepPlan(step, rows=[row(0, drafts=K)])
        planner.complete(plan)
        planner.land(plan, [RowResult([5], K)], list)
        clock.now += 0.1
    assert costs.seconds(1, K) == 1.0 + K
    assert watchdog.num_troubles["zero"] == 1 and plan.draft_reason == "unhealthy"


def test_a_change_of_k_is_one_debug_line_at_most_every_ten_seconds(
    planner: DraftPlanner, script: Script, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for step, (now, count, why) in enumerate(
            [(0, 3, "gain"), (1, 1, "gain"), (2, 3, "gain"), (11, 0, "no_gain"), (22, 1, "probe"),
             (33, 2, "gain")]
        ):  # fmt: skip
            clock.now, script.next = now, DraftLength(count, why)
            planner.complete(StepPlan(step, rows=[row(0)]))
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" with")[0] for line in lines] == [
        "speculation: K = 3", "speculation: K = 0", "speculation: K = 2"
    ]  # fmt: skip
    assert "no_gain" in lines[1]


def test_a_request_without_speculation_has_no_drafts_whatever_its_limit(
    planner: DraftPlanner, script: Script
) -> None:
    for enabled, most in ((True, 2), (False, 0)):
        sampling = SamplingParams(0, 9, speculative_enabled=enabled, speculative_max_tokens=2)
        new = NewRequest(0, [1] * 10, 10, 0, [[1]], sampling)
        planner.complete(StepPlan(0, new_requests=[new], rows=[row(0)]))
        tokens = script.tokens([0]).tolist()  # drafts beyond its cap yield none
        assert len(set(tokens)) == most + 1


def test_each_trouble_of_a_drafter_is_told_once(script: Script, clock: Clock) -> None:
    script.watchdog = Watchdog("eagle3", clock)
    planner = DraftPlanner(script, 4, max_deferred_tokens=5, trims=False, clock=clock)
    script.watchdog.observe(200, 0)
    first, second = StepStats(), StepStats()
    planner.tell_health(first)
    planner.tell_health(second)
    assert first.drafter_troubles == {"zero": 1} and second.drafter_troubles == {}
    assert first.drafter_healthy is second.drafter_healthy is False


def test_statistics_report_the_choice(planner: DraftPlanner, script: Script) -> None:
    script.next = DraftLength(2, "gain")
    plan, prompt = StepPlan(0, rows=[row(0)]), StepPlan(1, rows=[row(1, 0, 8, True)])
    stats, nothing = StepStats(), StepStats()
    for each, told in ((plan, stats), (prompt, nothing)):
        planner.complete(each)
        planner.tell(each, told)
    assert (stats.current_k, stats.k_reason) == (2, "gain")
    assert nothing.current_k is None


def test_the_gain_is_told_from_real_and_measured_durations(
    planner: DraftPlanner, script: Script, clock: Clock
) -> None:
    """A step of one request without drafts takes 1 s here, and one with K drafts 1 + K."""

    def told(step: int, drafts: int, next_drafts: int, seconds: float, kept: int) -> StepStats:
        script.next = DraftLength(next_drafts, "gain")
        plan = StepPlan(step, rows=[row(0, drafts)])
        planner.complete(plan)
        clock.now += seconds
        planner.land(plan, [RowResult([1] * kept, drafts)], list)
        stats = StepStats(num_generated_tokens=kept)
        planner.tell(plan, stats)
        return stats

    first = told(0, 0, 0, 1.0, 1)  # its beginning is not known
    assert (first.decode_seconds, first.seconds_without_drafts) == (0.0, 0.0)
    plain = told(1, 0, 0, 1.5, 1)
    assert (plain.decode_seconds, plain.seconds_without_drafts) == (1.5, 1.5)
    unit = script.costs.seconds(1, 0)
    before_drafts = told(2, 0, 2, 1.0, 1)  # makes drafts that the next step verifies
    assert before_drafts.seconds_without_drafts == pytest.approx(unit, rel=0.05)
    verified = told(3, 2, 0, 2.0, 3)
    assert verified.decode_seconds == 2.0
    assert verified.seconds_without_drafts == pytest.approx(3 * script.costs.seconds(1, 0))
    planner.rest()
    assert told(4, 0, 0, 9.0, 1).decode_seconds == 0.0  # the engine slept
    plan = StepPlan(5, rows=[row(0, 2), row(1, 2)])  # five tokens of two requests
    planner.complete(plan)
    planner.land(plan, [RowResult([1] * 3, 2), RowResult([1] * 2, 2)], list)
    both = StepStats(num_generated_tokens=5)
    clock.now += 1.0
    planner.land(plan, [RowResult([1] * 3, 2), RowResult([1] * 2, 2)], list)
    planner.tell(plan, both)
    assert both.seconds_without_drafts == pytest.approx(5 / 2 * script.costs.seconds(2, 0))


def test_graphs_for_every_k_stay_few() -> None:
    sizes = default_capture_sizes(2048)

    def count(lengths: Sequence[int]) -> int:
        return len(descriptors(CUDAGraphMode.FULL_DECODE_ONLY, lengths, sizes, 256, 2048))

    counts = SpeculativeConfig(method="eagle3").draft_counts
    lengths = [1, *(k + 1 for k in counts)]
    assert (count(lengths), count([1, lengths[-1]])) == (98, 60)
    chosen = descriptors(CUDAGraphMode.FULL_DECODE_ONLY, lengths, sizes, 256, 2048)
    for length in lengths:  # every batch has a graph, padded by at most a half
        of_length = sorted(d.num_reqs or 0 for d in chosen if d.uniform_token_count == length)
        assert of_length[-1] * length >= min(256 * length, 1024)
        for low, high in zip(of_length, of_length[1:], strict=False):
            assert high <= 2 * low


def test_prompts_in_a_step_count_in_the_choice_and_teach_what_rows_cost(
    planner: DraftPlanner, script: Script, clock: Clock
) -> None:
    seen: list[tuple[int, float, int, float]] = []
    script.costs.learn_prompts = lambda *args: seen.append(args)  # type: ignore[method-assign]
    mixed = [row(0, drafts=2), row(1, drafts=2), row(2, tokens=30), row(3, tokens=70, prefill=True)]
    plans = [StepPlan(step, rows=mixed) for step in range(20)]
    plans.append(StepPlan(20, rows=[row(0, drafts=2), row(1)]))
    before = script.costs.seconds(2, 2)
    for plan in plans:
        planner.complete(plan)
        clock.now += 0.5
        planner.land(plan, [RowResult([5], 2) for _ in plan.rows], list)
    assert script.prompt_rows[0] == 20 and script.prompt_rows[19] == pytest.approx(100, rel=0.02)
    assert script.prompt_rows[20] == 0  # the last step has no prompts
    assert seen == [(2, 2.0, 100, 0.5)] * 19  # the first has no earlier one to measure from
    assert script.costs.seconds(2, 2) != before  # by the last step only


@pytest.mark.parametrize(
    ("kept", "next_drafts", "expected"),
    [
        (3, [None, None], 3),
        (None, [None, None], MAX_DRAFTS),
        (3, [None, 1, 0, 5], [3, 1, 0, 3]),
        (None, [None, 2], [MAX_DRAFTS, 2]),
    ],
)
def test_a_row_stores_what_the_plan_allows_it_and_the_step_keeps(
    kept: int | None, next_drafts: list[int | None], expected: int | list[int]
) -> None:
    rows = [row(slot) for slot in range(len(next_drafts))]
    for each, most in zip(rows, next_drafts, strict=True):
        each.next_drafts = most
    assert _most_drafts(StepPlan(0, rows=rows), kept) == expected
