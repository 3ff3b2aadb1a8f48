"""Drafts cost more beside prompts: the choice of K in steps that also compute those."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.speculators.draft_length.prompt_rows import PromptRows
from slipstream.speculators.draft_length.step_costs import StepCosts

from ..simulated_engine import K, controller, measured, true_seconds

Law = tuple[float, ...]  # chance of each position, given that the drafts before it are right
GOOD, FAIR = (0.8, 0.75, 0.7), (0.6, 0.5, 0.45)
EACH = 0.0267e-3  # seconds of arithmetic for a row of an 8B model on an H100
TOKENS = 1 + np.cumsum([0.0, *np.cumprod(GOOD)])  # of a request, by number of drafts


def truth(num_reqs: int, k: int, num_prompt_rows: float, sharpness: float) -> float:
    """Seconds of a step: reading and arithmetic overlap more or less well, drafting does not."""
    rows = num_reqs * (1 + k)
    reading = max(0.0, true_seconds(num_reqs, 0) ** sharpness - (EACH * num_reqs) ** sharpness)

    def verify(count: float) -> float:
        return float((reading + (EACH * count) ** sharpness) ** (1 / sharpness))

    return true_seconds(num_reqs, k) + verify(rows + num_prompt_rows) - verify(rows)


def served(
    law: Law, num_reqs: int, ratio: float, sharpness: float, aware: bool, fixed: int | None = None
) -> tuple[float, list[int]]:
    """Output tokens per second and the chosen K of a loaded server: as each request that ends is
    followed by another, every token that is emitted brings `ratio` tokens of prompts."""
    chooser, random = controller(num_reqs), np.random.default_rng(num_reqs)
    slots, k, prompts, mean = list(range(num_reqs)), K, 0.0, 0.0
    tokens = seconds = 0.0
    chosen = []
    for step in range(240):
        mean += 0.2 * (prompts - mean)
        next_k = chooser.choose(slots, min(mean, prompts) if aware else 0.0).num_drafts
        took = truth(num_reqs, k, prompts, sharpness)
        right = random.random((num_reqs, K)) < law
        accepted = np.minimum(np.cumprod(right, axis=1).sum(1), k)
        if k:
            chooser.observe(slots, [k] * num_reqs, accepted.tolist())
        if prompts:
            chooser.costs.learn_prompts(num_reqs, k, int(prompts), took)
        else:
            chooser.costs.refine(num_reqs, k, took, k)
        emitted = num_reqs + accepted.sum()
        if step >= 100:
            tokens, seconds = tokens + emitted, seconds + took
            chosen.append(k)
        prompts, k = ratio * emitted, next_k if fixed is None else fixed
    return tokens / seconds, chosen


@pytest.mark.parametrize(
    ("law", "num_reqs", "ratio", "sharpness"),
    [(GOOD, 128, 3.0, 3.0), (FAIR, 32, 8.0, 3.0), (FAIR, 256, 3.0, 2.0), (FAIR, 256, 0.7, 6.0)],
)
def test_beside_many_prompts_drafts_are_fewer_and_the_server_faster(
    law: Law, num_reqs: int, ratio: float, sharpness: float
) -> None:
    """The work of prompts is the same whatever K is, so the best K spends least on each token."""
    blind, before = served(law, num_reqs, ratio, sharpness, aware=False)
    speed, after = served(law, num_reqs, ratio, sharpness, aware=True)
    assert np.mean(after) <= np.mean(before) - 0.9
    assert speed > 1.025 * blind
    assert speed > 0.95 * served(law, num_reqs, ratio, sharpness, False, 0)[0]


@pytest.mark.parametrize(("num_reqs", "ratio"), [(1, 1.0), (8, 0.7), (64, 8.0)])
def test_drafts_that_pay_are_kept(num_reqs: int, ratio: float) -> None:
    blind, before = served(GOOD, num_reqs, ratio, 3.0, aware=False)
    speed, after = served(GOOD, num_reqs, ratio, 3.0, aware=True)
    assert speed >= 0.995 * blind
    assert np.mean(after) > 2.8


def test_one_stream_beside_a_long_prompt_keeps_its_drafts() -> None:
    """Its drafts add little to a step of thousands of rows."""
    costs = StepCosts(measured(), K)
    speed = TOKENS / costs.beside(1, 4000)
    assert speed.argmax() == K


def test_costs_beside_prompts_are_those_of_the_drafts() -> None:
    costs = StepCosts(measured(), K)
    for num_reqs in (1, 8, 64, 256):
        alone = costs.row(num_reqs)
        assert costs.beside(num_reqs, 0).tolist() == alone.tolist()
        few, many = costs.beside(num_reqs, 50), costs.beside(num_reqs, 8000)
        assert few[0] == many[0] == alone[0]  # prompts are no cost of the drafts
        assert (
            (np.diff(many) > 0).all()
            and (many >= 0.999 * few).all()
            and (few >= 0.999 * alone).all()
        )
        each = costs._prompts.seconds_per_row
        assert each == pytest.approx(30.1e-3 / 1024)  # the largest measured step
        drafting = many[K] - many[0] - each * num_reqs * K
        assert -0.4e-3 < drafting < 1.5e-3  # all rows of drafts in full, and drafting itself


def test_beside_prompts_drafts_cost_no_more_in_steps_that_compute_all_the_time() -> None:
    rows = PromptRows({(64, k): 64 * (1 + k) * EACH for k in range(K + 1)})
    alone = 64 * EACH * np.arange(1, K + 2)
    assert rows.beside(alone, 64, 2000) == pytest.approx(alone)


def test_the_cost_of_a_row_follows_real_steps_that_compute_much() -> None:
    costs = StepCosts(measured(), K)
    for _ in range(200):  # longer contexts make rows dearer
        costs.learn_prompts(64, 3.0, 4000, truth(64, 3, 4000, 3.0) * 1.5)
    assert costs._prompts.seconds_per_row == pytest.approx(1.5 * EACH, rel=0.03)
    for _ in range(50):  # these wait for memory
        costs.learn_prompts(1, 0.0, 4, 3 * true_seconds(1, 0))
    assert costs._prompts.seconds_per_row == pytest.approx(1.5 * EACH, rel=0.05)


def test_without_measurements_the_first_step_with_prompts_tells_what_a_row_costs() -> None:
    costs = StepCosts({}, K)
    assert costs.beside(8, 500).tolist() == costs.row(8).tolist()
    costs.learn_prompts(8, 0.0, 500, 0.05)
    assert costs._prompts.seconds_per_row is None  # a step without prompts comes first
    costs.refine(8, 0, 0.006)
    costs.learn_prompts(8, 1.5, 480, 0.05)  # 20 rows verify drafts
    assert costs._prompts.seconds_per_row == pytest.approx(1e-4)
    assert (costs.beside(8, 500)[1:] > costs.row(8)[1:]).all()


def test_one_step_that_stalled_changes_the_cost_of_a_row_little() -> None:
    """Other work on the machine may make a step take a thousand times as long."""
    rows = PromptRows({(64, 0): 64 * EACH})
    assert rows.seconds_per_row == pytest.approx(EACH)
    for took, most in ((10.0, 1.08), (1e-9, 1.0)):
        before = rows.seconds_per_row
        rows.learn(took, np.full(K + 1, 64 * EACH), 64, 0.0, 4096)
        assert before / 1.08 < rows.seconds_per_row < before * most
