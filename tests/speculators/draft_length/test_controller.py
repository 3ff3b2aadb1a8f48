"""How K is chosen in a simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.speculators.draft_length.acceptance import Acceptance
from slipstream.speculators.draft_length.controller import DraftController
from slipstream.speculators.draft_length.probes import LASTING, Probe
from slipstream.speculators.draft_length.step_costs import StepCosts

from ...cases import some
from ..simulated_engine import LAWS, K, controller, fixed_speed, simulate

BATCHES = (1, 4, 16, 64, 128, 256)


@pytest.mark.parametrize(
    ("name", "num_reqs"),
    some(
        [(name, num_reqs) for name in LAWS for num_reqs in BATCHES],
        kept=[("good", 256), *((name, (1, 256)[at % 2]) for at, name in enumerate(LAWS))],
    ),
)
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


@pytest.mark.parametrize("num_reqs", some((1, 4, 16, 64), (1, 16)))
def test_drafts_that_begin_to_pay_are_noticed_soon(num_reqs: int) -> None:
    chooser = controller(num_reqs)
    assert simulate(LAWS["poor"], num_reqs, chooser, 500).chosen[-200:].count(0) >= 140
    run = simulate(LAWS["good"], num_reqs, chooser, 200)
    assert run.chosen[100:].count(3) >= 95
    again = simulate(LAWS["poor"], num_reqs, chooser, 200)
    assert again.chosen[100:].count(0) >= 60 and max(again.chosen[100:]) < 3


@pytest.mark.parametrize("num_reqs", some((8, 64, 256), (8,)))
def test_drafts_that_only_seem_to_pay_are_seldom_tried(num_reqs: int) -> None:
    """The first draft is often right and expensive, the others are cheap and wrong: a probe judges
    only the first, so its success promises more than there is."""
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


def test_probes_are_rarer_if_they_are_in_vain_and_once_much_later_if_drafting_was() -> None:
    probe = Probe()

    def due(num_steps: int) -> list[int]:
        return [step for step in range(num_steps) if probe.is_due(num_reqs=8, lost=0.0)]

    assert due(80) == [3, 7, 15, 31, 55, 79]
    probe.ended(10, 0.15)  # a loss of 1.5 steps, which may be 0.75 % of the time
    assert not probe.is_recent and due(248) == [199, 223, 247]
    recent = [probe.is_recent and not probe.is_due(8, 0.0) for _ in range(20)]
    assert recent == [True] * 16 + [False] * 4
    probe.ended(LASTING, 0.5)
    assert due(4) == [3]


def test_a_probe_moves_nothing_that_is_believed() -> None:
    """The acceptance that requests have in common becomes the prior of a new one."""
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


@pytest.mark.parametrize(
    ("best", "gain", "chosen"), [(0, 1.004, 3), (0, 1.02, 0), (1, 1.02, 3), (1, 1.04, 1)]
)
def test_no_drafts_need_promise_less_than_another_k(best: int, gain: float, chosen: int) -> None:
    tokens = controller(1).tokens([0])
    seconds = {(1, k): float(tokens[k]) * (1.0 if k == 3 else 1.05) for k in range(K + 1)}
    seconds[1, best] = float(tokens[best]) / gain
    chooser = controller(1, StepCosts(seconds, K))
    assert chooser.choose([0]).num_drafts == chosen


def test_a_k_above_every_cap_is_left_whatever_another_promises() -> None:
    chooser = controller(1, StepCosts({(1, k): 1.0 + 0.001 * k for k in range(K + 1)}, K))
    assert chooser.choose([0]).num_drafts == 3
    chooser.restart(0, 2, greedy=True)
    assert chooser.choose([0]).num_drafts == 2


def test_only_the_first_step_of_a_probe_fades_what_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser = controller(2, StepCosts({(2, k): 1.0 + 0.62 * k for k in range(K + 1)}, K))
    faded: list[int] = []
    steps: list[int] = []
    monkeypatch.setattr(Acceptance, "fade", lambda self, slots: faded.append(len(steps)))
    while len(steps) < 60:
        steps.append(chooser.choose([0, 1]).num_drafts)
    probes = [step for step, k in enumerate(steps) if k]
    assert len(probes) >= 6 and faded == probes[::3]  # three steps of two rows


def test_a_batch_that_grows_gets_another_k_at_once() -> None:
    chooser = controller(256)
    simulate(LAWS["good"], 8, chooser, 200)
    assert chooser.choose(range(8)).num_drafts == 3
    assert chooser.choose(range(256)).num_drafts == 1
    assert chooser.choose(range(8)).num_drafts == 3


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


def test_drafts_beyond_a_requests_cap_yield_no_tokens() -> None:
    chooser = controller(3)
    chooser.restart(1, 1, greedy=True)
    chooser.restart(2, 0, greedy=True)
    all_drafts = chooser.tokens([0])
    assert list(all_drafts) == sorted(set(all_drafts)) and len(all_drafts) == K + 1
    capped = [[all_drafts[min(k, cap)] for k in range(K + 1)] for cap in (K, 1, 0)]
    for slot in range(3):
        assert chooser.tokens([slot]) == pytest.approx(capped[slot])
    assert chooser.tokens([2, 0, 1]) == pytest.approx(np.sum(capped, axis=0))


def test_a_held_k_is_made_whatever_it_brings_until_it_is_let_go() -> None:
    chooser = controller(256)
    for k in (0, 3, 2):
        chooser.hold(k)
        run = simulate(LAWS["poor"], 256, chooser, 60)
        assert set(run.chosen) == {k} and set(run.reasons) == {"fixed"}
    chooser.hold(None)
    assert simulate(LAWS["poor"], 256, chooser, 200).chosen[-100:].count(0) >= 92
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
    """The drafts of a request with good drafts, beside requests that accept none."""
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
