"""The choice of K in a simulated engine: what steps cost is a table measured on an H100.

The table: an 8B model with an EAGLE-3 head, milliseconds of a step by requests and by K.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from slipstream.speculators.controller import DraftController
from slipstream.speculators.step_costs import StepCosts

H100 = {
    1: (5.22, 5.74, 6.03, 6.33),
    8: (5.60, 5.94, 6.30, 6.63),
    32: (6.02, 6.87, 7.32, 7.77),
    64: (6.53, 7.53, 9.65, 9.74),
    128: (7.77, 10.1, 13.2, 15.9),
    256: (10.65, 16.3, 24.0, 30.1),
}
BATCHES = (1, 4, 16, 64, 128, 256)
K = 3
GOOD, FAIR, POOR = (0.8, 0.75, 0.7), (0.5, 0.45, 0.4), (0.06, 0.05, 0.05)
Law = Callable[[float], tuple[float, ...]]  # share of the run -> chance of each position
LAWS: dict[str, Law] = {
    "good": lambda at: GOOD,
    "fair": lambda at: FAIR,
    "poor": lambda at: POOR,
    "becomes poor": lambda at: GOOD if at < 0.5 else POOR,
    "becomes good": lambda at: POOR if at < 0.5 else GOOD,
    "goes up and down": lambda at: POOR if int(4 * at) % 2 else GOOD,
}


@functools.cache
def true_seconds(num_reqs: int, num_drafts: int) -> float:
    sizes = sorted(H100)
    return float(np.interp(num_reqs, sizes, [H100[size][num_drafts] for size in sizes])) / 1000


def measured(sizes: Sequence[int] = tuple(H100)) -> dict[tuple[int, int], float]:
    return {(size, k): H100[size][k] / 1000 for size in sizes for k in range(K + 1)}


def controller(num_reqs: int, costs: StepCosts | None = None) -> DraftController:
    made = DraftController((1, 2, 3), num_reqs, costs or StepCosts(measured(), K))
    for slot in range(num_reqs):
        made.restart(slot, None, greedy=True)
    return made


@dataclass
class Run:
    """What a simulated run came to."""

    tokens: float = 0.0
    seconds: float = 0.0
    chosen: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def num_changes(self) -> int:
        """Changes of K that were no probes."""
        kept = [k for k, why in zip(self.chosen, self.reasons, strict=True) if why != "probe"]
        return sum(a != b for a, b in zip(kept, kept[1:], strict=False))


def fixed_speed(law: Law, num_reqs: int, k: int, num_steps: int) -> float:
    """Tokens per second that a fixed K comes to on the average."""
    laws = Counter(law(step / num_steps) for step in range(num_steps))
    tokens = sum(
        times * (1 + sum(np.prod(chances[: j + 1]) for j in range(k)))
        for chances, times in laws.items()
    )
    return float(num_reqs * tokens / (num_steps * true_seconds(num_reqs, k)))


def simulate(law: Law, num_reqs: int, chooser: DraftController, num_steps: int) -> Run:
    """Two steps in flight: the K of a step is chosen before the step before has landed."""
    random = np.random.default_rng(num_reqs)
    slots = list(range(num_reqs))
    run, landing, k = Run(), [], 0
    for step in range(num_steps):
        choice = chooser.choose(slots)
        right = random.random((num_reqs, K)) < law(step / num_steps)
        accepted = np.minimum(np.cumprod(right, axis=1).sum(1), k)
        took = true_seconds(num_reqs, k)
        run.tokens += num_reqs + accepted.sum()
        run.seconds += took
        run.chosen.append(choice.num_drafts)
        run.reasons.append(choice.reason)
        noisy = took * np.exp(random.normal(0, 0.02)) * (5 if random.random() < 0.01 else 1)
        landing.append((k, accepted.tolist(), noisy, k == choice.num_drafts))
        if len(landing) == 2:
            verified, brought, noted, is_steady = landing.pop(0)
            chooser.observe(slots, [verified] * num_reqs, brought)
            chooser.costs.refine(num_reqs, verified, noted, is_steady)
        k = choice.num_drafts
    return run


@pytest.mark.parametrize("num_reqs", BATCHES)
@pytest.mark.parametrize("name", LAWS)
def test_it_is_as_fast_as_the_best_fixed_k_and_never_slower_than_off(
    name: str, num_reqs: int
) -> None:
    num_steps = 1600 if num_reqs <= 16 else 600
    ours = simulate(LAWS[name], num_reqs, controller(num_reqs), num_steps)
    fixed = [fixed_speed(LAWS[name], num_reqs, k, num_steps) for k in range(K + 1)]
    assert ours.speed >= 0.97 * max(fixed)
    assert ours.speed >= 0.985 * fixed[0]  # the tokens are drawn, so they vary by as much
    assert ours.num_changes() <= num_steps / 40


@pytest.mark.parametrize(("num_reqs", "best"), [(1, 3), (8, 3), (64, 3), (128, 2), (256, 1)])
def test_the_cost_decides_which_k(num_reqs: int, best: int) -> None:
    run = simulate(LAWS["good"], num_reqs, controller(num_reqs), 400)
    assert run.chosen[-200:].count(best) >= 190


@pytest.mark.parametrize("num_reqs", [1, 4, 16, 64])
def test_drafts_that_begin_to_pay_are_noticed_soon(num_reqs: int) -> None:
    chooser = controller(num_reqs)
    assert simulate(LAWS["poor"], num_reqs, chooser, 500).chosen[-200:].count(0) >= 150
    run = simulate(LAWS["good"], num_reqs, chooser, 200)
    assert run.chosen[100:].count(3) >= 95
    again = simulate(LAWS["poor"], num_reqs, chooser, 200)
    assert again.chosen[100:].count(0) >= 60 and max(again.chosen[100:]) < 3


@pytest.mark.parametrize("num_reqs", [8, 64, 256])
def test_drafts_that_only_seem_to_pay_are_seldom_tried(num_reqs: int) -> None:
    """The first draft is often right and dear, the others are cheap and wrong: a probe judges the
    first alone, so that its success promises more than there is."""
    law, factors = (0.7, 0.05, 0.05), (1.0, 1.75, 1.8, 1.85)
    costs = StepCosts({(num_reqs, k): factor for k, factor in enumerate(factors)}, K)
    chooser, slots = controller(num_reqs, costs), list(range(num_reqs))
    random, chosen = np.random.default_rng(0), []
    for _ in range(3000):
        k = chooser.choose(slots).num_drafts
        right = random.random((num_reqs, K)) < law
        chooser.observe(
            slots, [k] * num_reqs, np.minimum(np.cumprod(right, axis=1).sum(1), k).tolist()
        )
        chosen.append(k)
    gain = [1.0, 1.7, 1.735, 1.73675]
    assert sum(gain[k] for k in chosen) / sum(factors[k] for k in chosen) >= 0.985


def test_a_probe_moves_nothing_that_is_believed() -> None:
    """What the requests have in common becomes what a new one is expected to do."""
    chooser, slots = controller(3), [0, 1]
    for step in range(300):
        chooser.observe(slots, [3, 3], [3, 3] if step < 200 else [0, 1])
    before = chooser.tokens(slots)
    assert chooser.tokens([2])[3] > before[3] / 2 + 0.3
    chooser._acceptance.fade(slots)
    assert chooser.tokens(slots)[1] == pytest.approx(before[1], rel=0.01)
    assert chooser.tokens(slots) == pytest.approx(before, rel=0.08)
    assert chooser.tokens([2])[1] == pytest.approx(before[1] / 2, rel=0.05)
    chooser.observe(slots, [1, 1], [1, 1])
    chooser.observe(slots, [1, 1], [1, 1])
    assert chooser.tokens(slots)[1] > before[1] + 0.2


def test_a_batch_that_grows_gets_another_k_at_once() -> None:
    chooser = controller(256)
    simulate(LAWS["good"], 8, chooser, 200)
    assert chooser.choose(range(8)).num_drafts == 3
    assert chooser.choose(range(256)).num_drafts == 1
    assert chooser.choose(range(8)).num_drafts == 3


def test_wrong_measurements_are_mended_by_real_steps() -> None:
    wrong = {(n, k): 0.005 * (1 + 0.01 * k) for n, k in measured()}  # drafts look free
    for num_reqs in (1, 256):
        chooser = controller(num_reqs, StepCosts(wrong, K))
        run = simulate(LAWS["poor"], num_reqs, chooser, 800)
        assert run.chosen[-300:].count(0) >= 240
        speeds = [fixed_speed(LAWS["poor"], num_reqs, k, 1) for k in range(K + 1)]
        lost = [speeds[0] / speeds[k] - 1 for k in run.chosen[-300:]]
        assert sum(lost) <= 0.02 * 300  # probes included


@pytest.mark.parametrize("num_reqs", [1, 3, 64])
@pytest.mark.parametrize("factor", [0.3, 2.0, 5.0])
@pytest.mark.parametrize("name", ["good", "poor"])
def test_measurements_beside_other_work_are_put_right_soon(
    name: str, factor: float, num_reqs: int
) -> None:
    """Drafts measured too dear would never be made, and so never be put right."""
    random = np.random.default_rng(num_reqs)
    disturbed = {
        (n, k): seconds * (factor if k else 1.0) * np.exp(random.normal(0, 0.2))
        for (n, k), seconds in measured().items()
    }
    costs = StepCosts(disturbed, K, is_trusted=False)
    run = simulate(LAWS[name], num_reqs, controller(num_reqs, costs), 2000)
    speeds = [fixed_speed(LAWS[name], num_reqs, k, 1) for k in range(K + 1)]
    assert run.speed >= 0.97 * max(speeds)
    assert all(costs.is_certain(num_reqs, k) for k in range(K + 1))
    for k in range(K + 1):
        assert costs.seconds(num_reqs, k) == pytest.approx(true_seconds(num_reqs, k), rel=0.1)


def test_what_is_measured_well_is_not_tried_for_its_cost() -> None:
    chooser = controller(1)
    run = simulate(LAWS["good"], 1, chooser, 300)
    assert set(run.chosen[-200:]) == {3} and "probe" not in run.reasons[-200:]


def test_one_disturbed_step_of_four_decides_no_cost() -> None:
    costs = StepCosts(measured(), K, is_trusted=False)
    for seconds in (0.010, 0.011, 0.100, 0.010):
        assert not costs.is_certain(8, 2)
        costs.refine(8, 2, seconds)
    assert costs.is_certain(8, 2) and not costs.is_certain(8, 1)
    assert costs.seconds(8, 2) == pytest.approx(0.010)
    # The others were measured beside the same work; their proportions stay.
    assert costs.seconds(8, 1) == pytest.approx(0.010 * H100[8][1] / H100[8][2])
    costs.refine(64, 3, 1.0, is_steady=False)  # it verified three and made another number
    assert costs.seconds(64, 3) < 0.010 * H100[64][3] / H100[8][2] * 1.03


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


def test_requests_that_want_none_or_few_are_respected() -> None:
    chooser = controller(4)
    assert chooser.choose([]).num_drafts == 0
    for slot in range(4):
        chooser.restart(slot, 0, greedy=True)
    assert chooser.choose(range(4)).reason == "requests"
    chooser.restart(1, 2, greedy=True)
    assert chooser.choose(range(4)).num_drafts in (1, 2)
    fixed = DraftController((3,), 4, StepCosts({}, K))
    fixed.restart(0, 2, greedy=True)
    assert fixed.choose([0]).num_drafts == 2
    fixed.restart(0, None, greedy=True)
    assert [fixed.choose([0]).num_drafts for _ in range(50)] == [3] * 50


def test_a_held_k_is_made_whatever_it_brings_until_it_is_let_go() -> None:
    chooser = controller(256)
    for k in (0, 3, 2):
        chooser.hold(k)
        run = simulate(LAWS["poor"], 256, chooser, 60)
        assert set(run.chosen) == {k} and set(run.reasons) == {"fixed"}
    chooser.hold(None)
    assert simulate(LAWS["poor"], 256, chooser, 200).chosen[-100:].count(0) >= 95
    assert simulate(LAWS["good"], 1, controller(1), 200).chosen[-100:].count(3) >= 95


def test_one_poor_request_among_good_ones_does_not_stop_the_others() -> None:
    chooser, slots = controller(4), list(range(4))
    for _ in range(100):
        chooser.choose(slots)
        chooser.observe(slots, [3] * 4, [3, 3, 3, 0])
    tokens = [chooser.tokens([slot])[3] for slot in slots]
    assert min(tokens[:3]) > 3.3 and tokens[3] < 2.2
    assert chooser.choose(slots).num_drafts == 3


# --- per request ------------------------------------------------------------------------------


def drafted_by_request(greedy: bool, others: int, delay: int = 1) -> list[int]:
    """Drafts of one request whose drafts are mostly right, in company that is hopeless."""
    chooser = DraftController((1, 2, 4, 8), 1 + others, StepCosts({}, 8), per_request=True)
    slots = list(range(1 + others))
    for slot in slots:
        chooser.restart(slot, None, greedy)
    counts, waiting, drafted = [], [], [0] * len(slots)
    for step in range(60):
        limits = chooser.choose(slots).limits
        assert limits is not None
        right = 8 if step % 5 else 1
        accepted = [min(drafted[0], right), *[0] * others]
        waiting.append((drafted, accepted))
        if len(waiting) > delay:
            chooser.observe(slots, *waiting.pop(0))
        counts.append(limits[0])
        drafted = limits
    return counts


def test_a_copy_gets_many_drafts_beside_hopeless_requests() -> None:
    counts = drafted_by_request(greedy=True, others=3)
    assert max(counts) == 8 and min(counts[10:]) >= 2


def test_drafts_of_a_request_with_a_temperature_depend_on_nothing_else() -> None:
    alone = drafted_by_request(greedy=False, others=0)
    assert alone == drafted_by_request(greedy=False, others=30)
    assert alone == drafted_by_request(greedy=False, others=0, delay=0)  # results come sooner
