"""Exact tests of the null hypothesis "drafts do not change what is sampled".

Every test here bounds its chance of a false alarm by the level it is given, for any sample size:
two samples are compared by Fisher's exact test, and a sample is compared with known probabilities
by a bet that cannot be won on average. None relies on a normal approximation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

_STAKES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # log odds by which a bet deviates, both ways
_NEGLIGIBLE = 1e-40
_SURE_OF = 1.645  # standard deviations: a bias of the detectable size is found 19 times in 20


def fisher(on: int, num_on: int, off: int, num_off: int, tolerance: float = 0.0) -> float:
    """The two-sided p-value of "a cell has the same odds in both samples", given its total count.

    `on` of `num_on` and `off` of `num_off` observations are in the cell. The null hypothesis allows
    the log odds to differ by `tolerance`. Source: Fisher's noncentral hypergeometric distribution.
    """
    high = _tail(on, num_on, on + off, num_off, math.exp(tolerance), upper=True)
    low = _tail(on, num_on, on + off, num_off, math.exp(-tolerance), upper=False)
    return min(1.0, 2 * min(high, low))


def _tail(at: int, n: int, total: int, m: int, odds: float, upper: bool) -> float:
    """P(X >= at), or P(X <= at), where X of `total` drawn observations are among the first n."""
    least, most = max(0, total - m), min(n, total)
    mode = min(most, max(least, round(total * n * odds / (n * odds + m))))
    whole, tail = 1.0, 1.0 if (mode >= at if upper else mode <= at) else 0.0
    weight, k = 1.0, mode
    while k < most and weight > _NEGLIGIBLE:
        weight *= odds * (n - k) * (total - k) / ((k + 1) * (m - total + k + 1))
        k += 1
        whole += weight
        tail += weight if (k >= at if upper else k <= at) else 0.0
    weight, k = 1.0, mode
    while k > least and weight > _NEGLIGIBLE:
        weight *= k * (m - total + k) / (odds * (n - k + 1) * (total - k + 1))
        k -= 1
        whole += weight
        tail += weight if (k >= at if upper else k <= at) else 0.0
    return max(_NEGLIGIBLE, tail / whole)


@dataclass(frozen=True)
class Comparison:
    """Two samples of one distribution."""

    total_variation: float
    bound: float  # the total variation that chance exceeds with probability `level` at most
    p_value: float  # smallest of all cells, times the number of cells
    level: float
    worst: Hashable  # the cell with the smallest p-value
    counts: tuple[int, int]  # its count in either sample

    @property
    def fails(self) -> bool:
        """Whether the samples differ by more than chance; its probability is at most `level`."""
        return self.p_value < self.level / 2 or self.total_variation > self.bound


def compare(
    on: Mapping[Hashable, int],
    off: Mapping[Hashable, int],
    level: float,
    tolerance: float = 0.0,
) -> Comparison:
    """Compare two samples, given as counts of each value.

    The cells are the values, and the sets of the 2, 4, 8 ... likeliest of them in both samples
    together. Only cells with enough observations to ever be significant count as tests (Tarone).
    Either half of `level` is spent on the cells and on the total variation.
    """
    num_on, num_off = sum(on.values()), sum(off.values())
    pooled = Counter(on)
    pooled.update(off)
    # Ties are broken by the value: an order that depends on the side would favour one of them.
    ordered = sorted(pooled, key=lambda value: (-pooled[value], repr(value)))
    cells: list[tuple[Hashable, int, int]] = [(v, on.get(v, 0), off.get(v, 0)) for v in ordered]
    size = 2
    while size < len(ordered):
        likely = ordered[:size]
        sums = [sum(side.get(v, 0) for v in likely) for side in (on, off)]
        cells.append((f"the {size} likeliest", sums[0], sums[1]))
        size *= 2
    least = [_best(a + b, num_on, num_off) for _, a, b in cells]
    able = [cell for cell, best in zip(cells, least, strict=True) if best * len(cells) < level / 2]
    p_value, counts = 1.0, (0, 0)
    worst: Hashable = None
    for value, a, b in able:
        p = fisher(a, num_on, b, num_off, tolerance) * len(able)
        if p < p_value:
            p_value, worst, counts = p, value, (a, b)
    distance = 0.5 * sum(abs(on.get(v, 0) / num_on - off.get(v, 0) / num_off) for v in ordered)
    bound = chance_distance(list(pooled.values()), num_on, num_off, level / 2) + tolerance / 2
    return Comparison(distance, bound, p_value, level, worst, counts)


def _best(total: int, num_on: int, num_off: int) -> float:
    """The smallest p-value that a cell with this total could have: all of it in one sample."""
    share = max(num_on, num_off) / (num_on + num_off)
    return 2.0 * min(share, 1 - share) ** total


def chance_distance(pooled: Sequence[int], num_on: int, num_off: int, level: float) -> float:
    """The total variation between two samples of one distribution that chance rarely exceeds.

    The mean is at most half the sum of the cells' standard deviations (Jensen), and the distance
    exceeds its mean by t with probability exp(-2 t^2 / (1/n + 1/m)) at most (McDiarmid).
    """
    whole, spread = num_on + num_off, 1 / num_on + 1 / num_off
    shares = (count / whole for count in pooled)
    mean = 0.5 * sum(math.sqrt(p * (1 - p) * spread) for p in shares)
    return min(1.0, mean + math.sqrt(math.log(1 / level) * spread / 2))


@dataclass
class Bet:
    """Tests whether an event happens as often as its known probabilities say.

    Each trial has its own probability, which must be fixed before the trial; trials may depend on
    earlier ones in any way. A gambler bets at fair odds that the log odds of the event are off by a
    stake; whoever is right multiplies the wealth. If the null hypothesis holds, the wealth exceeds
    1 / level with probability `level` at most (Ville's inequality).
    """

    num_trials: int = 0
    hits: int = 0
    expected: float = 0.0
    variance: float = 0.0
    _logs: list[float] = field(default_factory=lambda: [0.0] * (2 * len(_STAKES)))

    def add(self, hit: bool, p: float, tolerance: float = 0.0) -> None:
        """Add a trial: whether the event happened, and its probability.

        Under the null hypothesis, the log of the probability may be off by `tolerance`.
        """
        self.num_trials += 1
        self.hits += hit
        self.expected += p
        self.variance += p * (1 - p)
        high, low = min(1.0, p * math.exp(tolerance)), p * math.exp(-tolerance)
        for index, stake in enumerate(_STAKES):
            self._logs[index] += stake * hit - math.log1p(high * math.expm1(stake))
            self._logs[~index] += -stake * hit - math.log1p(low * math.expm1(-stake))

    def join(self, other: Bet) -> None:
        """Continue with the trials of another bet."""
        self.num_trials += other.num_trials
        self.hits += other.hits
        self.expected += other.expected
        self.variance += other.variance
        self._logs = [a + b for a, b in zip(self._logs, other._logs, strict=True)]

    @property
    def log_wealth(self) -> float:
        """Natural logarithm of the wealth, spread evenly over all stakes."""
        most = max(self._logs)
        return most + math.log(sum(math.exp(x - most) for x in self._logs) / len(self._logs))

    def fails(self, level: float) -> bool:
        """Whether the event happened more or less often than chance allows."""
        return self.log_wealth > math.log(1 / level)

    def excess(self) -> float:
        """The mean of (happened - probability): the bias that was observed."""
        return (self.hits - self.expected) / self.num_trials if self.num_trials else 0.0

    def detectable(self, level: float) -> float:
        """The smallest bias per trial that is found 19 times in 20; 1.0 without trials."""
        if not self.num_trials:
            return 1.0
        needed = math.sqrt(2 * (math.log(1 / level) + math.log(len(self._logs)))) + _SURE_OF
        return min(1.0, needed * math.sqrt(max(self.variance, 1.0)) / self.num_trials)
