"""Estimated step costs: from good or bad measurements, corrected by real steps."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.speculators.draft_length.probes import Trials
from slipstream.speculators.draft_length.step_costs import StepCosts

from ...cases import some
from ..simulated_engine import (
    EXPERTS,
    EXPERTS_AT_START,
    GOOD,
    H100,
    LAWS,
    POOR,
    K,
    Law,
    Traffic,
    controller,
    fixed_speed,
    measured,
    simulate,
    true_seconds,
)


def test_wrong_measurements_are_mended_by_real_steps() -> None:
    wrong = {(n, k): 0.005 * (1 + 0.01 * k) for n, k in measured()}  # drafts look free
    for num_reqs in (1, 256):
        chooser = controller(num_reqs, StepCosts(wrong, K))
        run = simulate(LAWS["poor"], num_reqs, chooser, 800)
        assert run.chosen[-300:].count(0) >= 240
        speeds = [fixed_speed(LAWS["poor"], num_reqs, k, 1) for k in range(K + 1)]
        lost = [speeds[0] / speeds[k] - 1 for k in run.chosen[-300:]]
        assert sum(lost) <= 0.02 * 300  # probes included


@pytest.mark.parametrize("num_reqs", some((1, 3, 64), (1,)))
@pytest.mark.parametrize("factor", some((0.3, 2.0, 5.0), (0.3, 5.0)))
@pytest.mark.parametrize("name", ["good", "poor"])
def test_measurements_beside_other_work_are_put_right_soon(
    name: str, factor: float, num_reqs: int
) -> None:
    """If drafts were measured as too expensive, they would never be made and the cost never
    corrected."""
    random = np.random.default_rng(num_reqs)
    disturbed = {
        (n, k): seconds * (factor if k else 1.0) * np.exp(random.normal(0, 0.2))
        for (n, k), seconds in measured().items()
    }
    costs = StepCosts(disturbed, K, is_trusted=False)
    run = simulate(LAWS[name], num_reqs, controller(num_reqs, costs), 2000)
    speeds = [fixed_speed(LAWS[name], num_reqs, k, 1) for k in range(K + 1)]
    best = int(np.argmax(speeds))
    assert run.speed >= 0.97 * speeds[best]
    assert costs.is_certain(num_reqs, 0) and costs.is_certain(num_reqs, best)
    assert costs.seconds(num_reqs, best) == pytest.approx(true_seconds(num_reqs, best), rel=0.1)


def of_experts(num_reqs: int, num_drafts: float) -> float:
    return float(np.interp(num_drafts, range(K + 1), EXPERTS[num_reqs])) / 1000


def to_best(law: Law, num_reqs: int, costs: dict[tuple[int, int], float], steps: int) -> float:
    """The speed of a run that begins with these costs, as a share of the best fixed K's."""
    chooser = controller(num_reqs, StepCosts(costs, K))
    run = simulate(law, num_reqs, chooser, steps, seconds=of_experts)
    fixed = [fixed_speed(law, num_reqs, k, steps, of_experts) for k in range(K + 1)]
    return run.speed / max(fixed)


@pytest.mark.parametrize("num_reqs", [32, 128])
@pytest.mark.parametrize("name", ["good", "poor"])
def test_a_start_that_measured_too_few_experts_is_put_right(name: str, num_reqs: int) -> None:
    """Whether all of its costs are too low by the same factor, or by different ones."""
    cells = [(n, k) for n in EXPERTS for k in range(K + 1)]
    shared = {(n, k): EXPERTS_AT_START[n][k] / 1000 for n, k in cells}
    third = {cell: of_experts(*cell) / 3 for cell in cells}
    for wrong in (shared, third):
        assert to_best(LAWS[name], num_reqs, wrong, 240) >= 0.955


@pytest.mark.parametrize("num_reqs", [32, 128])
def test_drafting_after_a_wrong_cost_is_no_probe_in_vain(num_reqs: int) -> None:
    """K = 0 seems cheap until it is chosen. If its cost then ends that, and poor drafts end the
    drafting soon after, the next probes must not wait."""
    wrong = {(n, k): of_experts(n, k) * (1.0 if k else 0.67) for n in EXPERTS for k in range(K + 1)}
    law: Law = lambda at: POOR if 1 / 3 <= at < 2 / 3 else GOOD  # noqa: E731
    assert to_best(law, num_reqs, wrong, 240) >= 0.96


def test_the_first_steps_of_a_size_move_all_costs_that_are_not_confirmed() -> None:
    costs = StepCosts(measured(), K)
    for seconds in (0.5, 1.0, 2.0):  # measured times, of three drafts; the middle one counts
        costs.refine(64, 3, seconds * 2 * H100[64][3] / 1000, steady=3)
    assert costs.seconds(64, 3) == pytest.approx(2 * H100[64][3] / 1000)
    assert costs.seconds(64, 0) == pytest.approx(2 * H100[64][0] / 1000)
    for _ in range(3):
        costs.refine(64, 0, 1.5 * H100[64][0] / 1000, steady=0)
    assert costs.seconds(64, 0) == pytest.approx(1.5 * H100[64][0] / 1000)
    for k in (1, 2):  # between two confirmed ones
        factor = costs.seconds(64, k) / (H100[64][k] / 1000)
        assert 1.5 < factor < 2.0
    for _ in range(3):  # another size that was measured right
        costs.refine(8, 3, H100[8][3] / 1000, steady=3)
    assert costs.seconds(8, 3) == pytest.approx(H100[8][3] / 1000, rel=0.01)


def times(costs: StepCosts, num_reqs: int) -> list[float]:
    """Costs of a size by number of drafts, as multiples of the measured ones."""
    return [costs.seconds(num_reqs, k) / (H100[num_reqs][k] / 1000) for k in range(K + 1)]


def test_costs_that_fall_are_believed_at_once_and_other_sizes_fall_with_the_first_only() -> None:
    costs = StepCosts(measured(), K)
    for num_reqs, factor in ((64, 0.5), (8, 0.25)):
        for _ in range(3):
            costs.refine(num_reqs, 3, factor * H100[num_reqs][3] / 1000, steady=3)
    for num_reqs in (1, 8, 64, 256):
        factor = 0.25 if num_reqs == 8 else 0.5
        assert times(costs, num_reqs) == pytest.approx([factor] * (K + 1))


def test_no_k_seems_cheaper_than_fewer_drafts_that_turned_out_dear() -> None:
    costs = StepCosts(measured(), K)
    for _ in range(3):
        costs.refine(64, 0, 2 * H100[64][0] / 1000, steady=0)
    row = costs.row(64)
    assert row[0] == pytest.approx(2 * H100[64][0] / 1000) and list(row) == sorted(row)


def test_steps_of_several_engines_contradict_no_measurement() -> None:
    costs = StepCosts(measured(), K, is_alone=False)
    for _ in range(3):
        costs.refine(64, 3, 2 * H100[64][3] / 1000, steady=3)
    assert costs.seconds(64, 3) < 1.1 * H100[64][3] / 1000


HARD_TO_TELL = [
    ("good", 2, Traffic(caps=[3, 0])),  # K = 1 comes to half a draft each
    ("poor", 8, Traffic(caps=[1, 2, 3, 3, 1, 2, 3, 3])),
    ("poor", 8, Traffic(most_real=1)),
    ("poor", 8, Traffic(has_prompts=True)),
]
OF_MANY = [
    ("poor", 64, Traffic(caps=[3, 0] * 32)),
    ("poor", 64, Traffic(most_real=1)),
    ("good", 64, Traffic(has_prompts=True)),
    ("poor", 64, Traffic(has_prompts=True)),
]


@pytest.mark.parametrize(
    ("name", "num_reqs", "traffic"), some([*HARD_TO_TELL, *OF_MANY], kept=HARD_TO_TELL)
)
def test_trials_end_where_no_step_can_tell_the_cost(
    name: str, num_reqs: int, traffic: Traffic
) -> None:
    """Correct guesses cost little more than trusted measurements."""
    known = simulate(LAWS[name], num_reqs, controller(num_reqs), 2000, traffic)
    costs = StepCosts(measured(), K, is_trusted=False)
    run = simulate(LAWS[name], num_reqs, controller(num_reqs, costs), 2000, traffic)
    tried = run.reasons[-500:].count("probe") - known.reasons[-500:].count("probe")
    assert tried <= 20
    assert run.speed >= 0.975 * known.speed


@pytest.mark.parametrize(("num_reqs", "share"), [(64, 0.97), (256, 0.95)])
def test_no_k_is_tried_that_could_not_pay(num_reqs: int, share: float) -> None:
    """More drafts cost at least what fewer drafts are known to cost."""
    costs = StepCosts(measured(), K, is_trusted=False)
    run = simulate(LAWS["poor"], num_reqs, controller(num_reqs, costs), 300)
    assert run.speed >= share * fixed_speed(LAWS["poor"], num_reqs, 0, 1)
    assert (K, "probe") not in zip(run.chosen, run.reasons, strict=True)


def test_costs_of_a_busy_time_are_forgotten_after_it() -> None:
    """At first steps took three times as long; drafts pay only long after that."""
    law: Law = lambda at: POOR if at < 0.5 else GOOD  # noqa: E731
    busy = Traffic(slowed=lambda step: 3.0 if step < 150 else 1.0)
    costs = StepCosts({cell: 3 * t for cell, t in measured().items()}, K, is_trusted=False)
    run = simulate(law, 1, controller(1, costs), 3000, busy)
    assert run.chosen[-1000:].count(3) >= 950
    assert costs.seconds(1, 3) == pytest.approx(true_seconds(1, 3), rel=0.1)


def test_trials_have_four_steps_and_are_rarer_while_they_teach_nothing() -> None:
    costs, trials = StepCosts(measured(), K, is_trusted=False), Trials()
    for _ in range(4):
        costs.refine(8, 0, true_seconds(8, 0), steady=0)

    def tried(num_steps: int, *allowed: int) -> list[int]:
        row, tokens = costs.row(8), np.arange(1.0, K + 2)
        found = [trials.next(costs, 8, row, tokens, allowed) for _ in range(num_steps)]
        assert set(found) <= {None, 1}  # the first K whose cost is not known
        return [step for step, k in enumerate(found) if k]

    assert tried(73, 0, 1, 2, 3) == [*range(15, 19), *range(34, 38), *range(69, 73)]
    costs.refine(8, 1, true_seconds(8, 1), steady=1)  # as in the last trial
    assert tried(67, 0, 1, 3) == [63, 64, 65, 66] and tried(19, 0, 1) == [15, 16, 17, 18]
    assert tried(32, 0, 1) == [31] and tried(3, 0) == []  # no request wants drafts any more


@pytest.mark.parametrize(("tokens", "tried"), [(1.02, None), (1.04, 1)])
def test_a_k_that_would_gain_little_if_it_cost_nothing_is_not_tried(
    tokens: float, tried: int | None
) -> None:
    costs, trials = StepCosts(measured(), K, is_trusted=False), Trials()
    for _ in range(4):
        costs.refine(8, 0, true_seconds(8, 0), steady=0)
    expected = np.array([1.0] + [tokens] * K)
    for _ in range(16):
        found = trials.next(costs, 8, costs.row(8), expected, (0, 1, 2, 3))
    assert found == tried


@pytest.mark.parametrize("num_reqs", [1, 64, 256])
def test_what_is_measured_well_is_tried_once_and_late(num_reqs: int) -> None:
    run = simulate(LAWS["good"], num_reqs, controller(num_reqs), 400)
    known = simulate(LAWS["good"], num_reqs, controller(num_reqs, not_alone()), 400)
    tried = [k for k, why in zip(run.chosen, run.reasons, strict=True) if why == "probe"]
    assert all(tried.count(k) in (0, 4) for k in range(K + 1))
    assert "probe" not in run.reasons[:16]
    assert run.speed >= 0.99 * known.speed


def not_alone() -> StepCosts:
    """Costs that no single step decides, so that none is tried."""
    return StepCosts(measured(), K, is_alone=False)


def disturbed(how: str) -> dict[tuple[int, int], float]:
    """Measurements beside another engine on the GPU."""
    factors = np.random.default_rng(3).uniform(1, 2, (512, K + 1))
    wrong = {
        "all with drafts": lambda n, k: 1.5 if k else 1.0,
        "one draft": lambda n, k: 1.5 if k == 1 else 1.0,
        "no drafts": lambda n, k: 1.0 if k else 1.5,
        "any": lambda n, k: float(factors[n, k]),
    }[how]
    return {(n, k): seconds * wrong(n, k) for (n, k), seconds in measured().items()}


@pytest.mark.parametrize("how", ["all with drafts", "one draft", "no drafts", "any"])
@pytest.mark.parametrize("num_reqs", [8, 256])
def test_what_was_measured_too_dear_is_tried(how: str, num_reqs: int) -> None:
    for name in ("good", "poor"):
        chooser = controller(num_reqs, StepCosts(disturbed(how), K))
        run = simulate(LAWS[name], num_reqs, chooser, 400)
        best = max(fixed_speed(LAWS[name], num_reqs, k, 1) for k in range(K + 1))
        assert run.speed >= 0.95 * best


def test_one_disturbed_step_of_three_decides_no_cost() -> None:
    costs = StepCosts(measured(), K, is_trusted=False)
    for seconds in (0.010, 0.100, 0.010):
        assert not costs.is_certain(8, 2)
        costs.refine(8, 2, seconds, steady=2)
    assert costs.is_certain(8, 2) and not costs.is_certain(8, 1)
    assert costs.seconds(8, 2) == pytest.approx(0.010)
    # The others were measured beside the same work; their proportions stay.
    assert costs.seconds(8, 1) == pytest.approx(0.010 * H100[8][1] / H100[8][2])
    for _ in range(10):  # it verified three and made another number
        costs.refine(64, 3, 0.010)
    assert not costs.is_certain(64, 3)


def test_steps_before_a_change_decide_no_cost_after_it() -> None:
    costs = StepCosts(measured(), K, is_trusted=False)
    for num_drafts, num_steps in ((0, 3), (1, 2)):
        for _ in range(num_steps):
            costs.refine(8, num_drafts, true_seconds(8, num_drafts), steady=num_drafts)
    for _ in range(30):
        costs.refine(8, 0, 2 * true_seconds(8, 0), steady=0)
    for _ in range(3):
        assert not costs.is_certain(8, 1)
        costs.refine(8, 1, 2 * true_seconds(8, 1), steady=1)
    assert costs.seconds(8, 1) == pytest.approx(2 * true_seconds(8, 1))
    costs.refine(8, 0, 2 * true_seconds(8, 0), steady=0)
    assert costs.is_certain(8, 1)  # nothing has changed since then


@pytest.mark.parametrize(("is_trusted", "shared"), [(True, 0.3), (False, 1.0)])
def test_a_step_moves_its_own_cost_most_and_guesses_as_much(
    is_trusted: bool, shared: float
) -> None:
    costs = StepCosts(measured(), K, is_trusted, is_alone=False)
    costs.refine(8, 2, 1.1 * true_seconds(8, 2))
    for num_reqs, num_drafts in measured():
        share = 1.0 if (num_reqs, num_drafts) == (8, 2) else shared
        moved = costs.seconds(num_reqs, num_drafts) / true_seconds(num_reqs, num_drafts)
        assert moved == pytest.approx(1.1 ** (0.1 * share))


def test_steps_with_drafts_for_some_decide_the_cost_of_their_k() -> None:
    costs = StepCosts(measured(), K, is_trusted=False)
    for _ in range(4):  # one of two requests wants none
        costs.refine(2, 0.5, 2 * costs.seconds(2, 0.5), steady=1)
    assert costs.is_certain(2, 1) and not costs.is_certain(2, 0)


@pytest.mark.parametrize("slow", [1.0, 1.6])
def test_unmeasured_sizes_lie_between_the_measured_ones(slow: float) -> None:
    costs = StepCosts(measured((1, 64, 256)), K)
    for _ in range(300):  # a context that makes every step longer
        costs.refine(64, 3, slow * H100[64][3] / 1000)
    for num_reqs in (1, 8, 32, 64, 128, 256):
        for k in range(K + 1):
            between = costs.seconds(num_reqs, k) / true_seconds(num_reqs, k)
            assert 0.85 < between < (1.2 if slow == 1.0 else 1.8)
    assert costs.seconds(64, 3) == pytest.approx(slow * H100[64][3] / 1000, rel=0.02)
    assert costs.seconds(512, 1) == pytest.approx(2 * costs.seconds(256, 1))


def test_beyond_the_largest_measured_size_drafts_cost_more_not_the_same_share() -> None:
    costs = StepCosts({(1, 0): 0.05, (1, 4): 0.08}, 4)  # a slow start measured one request only
    assert costs.seconds(8, 0) == pytest.approx(0.05 * 19 / 12)
    assert costs.seconds(8, 4) == pytest.approx(0.08 * 52.9 / 17.2)


def test_an_outlier_hardly_moves_a_cost() -> None:
    costs = StepCosts(measured(), K)
    costs.refine(8, 2, 100.0)
    assert costs.seconds(8, 2) == pytest.approx(H100[8][2] / 1000, rel=0.03)


def test_costs_rise_with_drafts_whatever_was_measured() -> None:
    disturbed = {(1, 0): 0.040, (1, 2): 0.030, (1, 8): 0.090}
    row = StepCosts(disturbed, 8).row(1)
    assert list(row) == sorted(row) and row[8] == 0.090


def test_without_a_measurement_the_first_step_gives_the_scale() -> None:
    costs = StepCosts({}, K)
    costs.refine(1, 0, 0.04)
    assert costs.seconds(1, 0) == pytest.approx(0.04)
    assert costs.seconds(1, 3) == pytest.approx(0.04 * (15 + 1.2) / 12)
