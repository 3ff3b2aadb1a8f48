"""Exact tests: they agree with scipy, raise no more false alarms than they say, and have power."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from scipy.stats import fisher_exact, nchypergeom_fisher

from slipstream.server.verify.statistics import Bet, chance_distance, compare, fisher


@pytest.mark.parametrize(
    ("on", "num_on", "off", "num_off"),
    [(3, 40, 12, 50), (0, 30, 9, 30), (25, 30, 10, 30), (1, 1000, 20, 900), (500, 1000, 520, 1000)],
)
def test_fisher_doubles_the_smaller_tail_of_the_exact_distribution(
    on: int, num_on: int, off: int, num_off: int
) -> None:
    table = [[on, num_on - on], [off, num_off - off]]
    tails = [fisher_exact(table, alternative=side).pvalue for side in ("less", "greater")]
    assert fisher(on, num_on, off, num_off) == pytest.approx(min(1, 2 * min(tails)), rel=1e-8)


def test_a_tolerance_moves_the_null_hypothesis_by_log_odds() -> None:
    law = nchypergeom_fisher(200, 90, 100, math.exp(0.3))  # the 100 of one sample; 90 in the cell
    assert fisher(60, 100, 30, 100, 0.3) == pytest.approx(2 * law.sf(59), rel=1e-6)
    assert fisher(60, 100, 30, 100, 0.3) > 10 * fisher(60, 100, 30, 100)


def test_two_samples_of_one_distribution_rarely_differ_and_of_two_do() -> None:
    """The level is far above that of reports, so that its bound can be seen."""
    draw = random.Random(1)
    weights = [2.0 ** -(n / 2) for n in range(40)]

    def sample(count: int, of: list[float]) -> Counter[int]:
        return Counter(draw.choices(range(len(of)), of, k=count))

    level, rounds = 0.1, 120
    alarms = sum(
        compare(sample(150, weights), sample(150, weights), level).fails for _ in range(rounds)
    )
    assert alarms <= level * rounds + 3 * math.sqrt(level * rounds)
    shifted = [weights[1], weights[0], *weights[2:]]
    found = compare(sample(900, weights), sample(900, shifted), 1e-3)
    assert found.fails and found.worst in (0, 1)
    assert 0.05 < found.total_variation < found.bound + 0.1


def test_rare_values_of_either_side_are_no_difference() -> None:
    """All values are distinct: a set of likely ones must not prefer a side among equals."""
    on = Counter({(n, 0): 1 for n in range(200)})
    off = Counter({(n, 1): 1 for n in range(200)})
    assert compare(on, off, 1e-3).p_value > 1e-3


def test_chance_exceeds_the_bound_of_the_total_variation_as_rarely_as_promised() -> None:
    draw = random.Random(2)
    count, level = 60, 0.2
    beyond = 0
    for _ in range(200):
        sides = [Counter(draw.choices("abcd", k=count)) for _ in range(2)]
        distance = sum(abs(sides[0][x] - sides[1][x]) for x in "abcd") / count / 2
        pooled = [sides[0][x] + sides[1][x] for x in "abcd"]
        beyond += distance > chance_distance(pooled, count, count, level)
    assert 0 <= beyond <= level * 200


def bet(bias: float, trials: int, seed: int) -> Bet:
    draw, found = random.Random(seed), Bet()
    for _ in range(trials):
        p = draw.uniform(0.03, 0.1)
        found.add(draw.random() < p + bias, p)
    return found


def test_a_bet_at_true_probabilities_is_not_won() -> None:
    level = 0.05
    won = sum(bet(0.0, 300, seed).fails(level) for seed in range(200))
    assert won <= level * 200


def test_a_bias_of_the_detectable_size_is_found() -> None:
    level = 1e-5
    size = bet(0.0, 8000, 0).detectable(level)
    assert 0.005 < size < 0.02
    assert sum(bet(size, 8000, seed).fails(level) for seed in range(8)) >= 7
    assert bet(-size, 8000, 1).fails(level) and bet(-size, 8000, 1).excess() < 0
    assert Bet().detectable(level) == 1.0 and not Bet().fails(level)


def test_joined_bets_are_one_bet() -> None:
    joint = bet(0.01, 500, 1)
    joint.join(bet(0.01, 500, 2))
    assert joint.num_trials == 1000 and joint.log_wealth > bet(0.01, 500, 1).log_wealth - 3


def test_a_bet_allows_for_rounding() -> None:
    exact, rounded = Bet(), Bet()
    draw = random.Random(3)
    for _ in range(4000):
        hit = draw.random() < 0.5 * math.exp(0.1)
        exact.add(hit, 0.5)
        rounded.add(hit, 0.5, tolerance=0.1)
    assert exact.fails(1e-5) and not rounded.fails(1e-5)
