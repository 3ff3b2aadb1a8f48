"""Estimates the duration of a step from its number of requests and of drafts per request.

It starts from the measurements at start-up, interpolates the rest, and follows the duration of real
steps. If the first real steps of a size contradict its measurement, it moves all costs that no real
step has decided. It knows nothing about acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from statistics import median_low

import numpy as np

from .prompt_rows import PromptRows

# Cost model until measurements exist, in token-row units: a fixed overhead of 11, plus 1 per token,
# plus 10 % of the cost without drafts if the step verifies any. Only ratios matter: the first real
# step provides the unit.
_FIXED_ROWS, _VERIFY_COST = 11.0, 0.1
_RATE = 0.1  # share of the difference to a real step by which its cell moves
_SHARED = 0.3  # share of that by which all other cells move: a longer context slows them all
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of requests that have cells of their own
_OUTLIER = 0.2  # larger differences (of logarithms) count as this
_ENOUGH = 3  # real steps that decide the cost of a cell
_SURPRISE = 0.15  # if they differ by more (in logarithms), a trusted measurement was wrong
_NOISE = 0.05  # smaller differences change no trusted measurement
_LAPSE = 0.4  # if a cell has moved by more (in logarithms) since then, the others are guesses again


def assumed_seconds(num_reqs: float, num_drafts: float) -> float:
    """Duration of a step in token-row units, for sizes without a measurement."""
    verify = _VERIFY_COST * (_FIXED_ROWS + num_reqs) if num_drafts else 0.0
    return _FIXED_ROWS + num_reqs * (1 + num_drafts) + verify


def assumed_row(num_reqs: int, max_drafts: int) -> np.ndarray:
    """`assumed_seconds` by number of drafts, [K + 1]."""
    return np.array([assumed_seconds(num_reqs, k) for k in range(max_drafts + 1)])


class StepCosts:
    """Seconds of a step of N requests with K drafts each; K may be a mean.

    A cell is an (N, K) with a cost of its own; other costs are interpolated.
    """

    def __init__(
        self,
        measured: Mapping[tuple[int, int], float],
        max_drafts: int,
        is_trusted: bool = True,
        is_alone: bool = True,
    ) -> None:
        """`measured`: (N, K) -> seconds, any subset; empty = only the cost model.

        Without `is_trusted` the measurements are guesses until a few real steps replace them,
        because other work on this machine may have disturbed them. Without `is_alone` the duration
        of a step also depends on other engines, so that no single step contradicts a measurement.
        """
        sizes = sorted({size for size, _ in measured})
        self.is_known = bool(measured)  # whether costs are in seconds
        rows = [_fill_row(size, measured, max_drafts) for size in sizes]
        # Sizes beyond the measured ones have the ratios of the cost model.
        scale = rows[-1] / assumed_row(sizes[-1], max_drafts) if sizes else 1.0
        for size in [size for size in _SIZES if not sizes or size > sizes[-1]]:
            sizes.append(size)
            rows.append(scale * assumed_row(size, max_drafts))
        self._sizes = sizes
        self._seconds = np.array(rows)  # [sizes, K + 1]
        self._factors = np.zeros_like(self._seconds)  # logarithms of learned corrections
        self.is_trusted = is_trusted
        self.decides = is_alone  # whether the first real steps of a cell decide its cost
        self._is_certain = np.zeros(self._seconds.shape, dtype=bool)  # decided by real steps
        self._decided = np.full(self._seconds.shape, np.nan)  # factors when that happened
        # Factors that real steps suggest for the other cells.
        self._wanted: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.was_wrong = False  # whether a trusted measurement was
        self._prompts = PromptRows(measured)
        self.num_learned = 0  # real steps that taught something about a guess

    def beside(self, num_reqs: int, num_prompt_rows: float) -> np.ndarray:
        """Costs of a step of N requests by number of drafts, [K + 1], where it also computes
        `num_prompt_rows` tokens of prompts. What those take without drafts is left out."""
        return self._prompts.beside(self.row(num_reqs), num_reqs, num_prompt_rows)

    def learn_prompts(
        self, num_reqs: int, num_drafts: float, num_prompt_rows: int, seconds: float
    ) -> None:
        """Learn from the duration of a real step that also computed prompts."""
        if seconds > 0 and self.is_known:
            alone = self.row(num_reqs)
            self._prompts.learn(seconds, alone, num_reqs, num_drafts, num_prompt_rows)

    def row(self, num_reqs: int) -> np.ndarray:
        """Seconds of a step of N requests by number of drafts, [K + 1]."""
        index = bisect_left(self._sizes, num_reqs)
        if index == len(self._sizes):  # larger than all: proportional to the requests
            scale = num_reqs / self._sizes[-1]
            return scale * self._corrected(index - 1)
        upper = self._corrected(index)
        if self._sizes[index] == num_reqs or not index:
            return upper
        lower, low = self._corrected(index - 1), self._sizes[index - 1]
        share = (num_reqs - low) / (self._sizes[index] - low)
        mixed: np.ndarray = lower + share * (upper - lower)
        return mixed

    def seconds(self, num_reqs: int, num_drafts: float) -> float:
        """Seconds of a step."""
        row = self.row(num_reqs)
        if num_drafts in range(len(row)):
            return float(row[int(num_drafts)])
        return float(np.interp(num_drafts, np.arange(len(row)), row))

    def is_certain(self, num_reqs: int, num_drafts: int) -> bool:
        """Whether real steps have decided the cost of such a step."""
        return bool(self._is_certain[self._index(num_reqs), num_drafts])

    def refine(
        self, num_reqs: int, num_drafts: float, seconds: float, steady: int | None = None
    ) -> None:
        """Learn from the duration of a real step; rare outliers change little.

        `steady`: the step's K if it made as many drafts as it verified, else None. Only such steps
        replace guesses, since the duration of others belongs to two values of K.
        """
        if seconds <= 0:
            return
        difference = float(np.log(seconds / self.seconds(num_reqs, num_drafts)))
        if not self.is_known:  # the cost model has no unit
            self._factors += difference
            self.is_known = True
            return
        index = self._index(num_reqs)
        rows = [index, index - 1] if index and num_reqs < self._sizes[index] else [index]
        if steady is not None and self.decides:
            new = [(row, steady) for row in rows if not self._is_certain[row, steady]]
            if any([self._learn(cell, difference) for cell in new]):
                return
        step = _RATE * min(max(difference, -_OUTLIER), _OUTLIER)
        follows = self._is_certain | self.is_trusted
        shared = np.where(follows, _SHARED * step, step)
        for row in rows:
            shared[row, round(num_drafts)] = step
        self._factors += shared
        for row in rows:
            if self._is_certain[row, round(num_drafts)]:
                self._check((row, round(num_drafts)))

    def _learn(self, cell: tuple[int, int], difference: float) -> bool:
        """Note by how much (in logarithms) a real step differs from an undecided cost; enough of
        them decide it. True if nothing else may learn from the step."""
        self.num_learned += 1
        wanted, row = self._wanted[cell], cell[0]
        wanted.append(float(self._factors[cell]) + difference)
        if len(wanted) < _ENOUGH:
            return not self.is_trusted or abs(difference) > _SURPRISE
        change = median_low(wanted) - float(self._factors[cell])
        wanted.clear()
        is_first = not self._is_certain[row].any()
        is_wrong = self.is_trusted and abs(change) > _SURPRISE
        if not self.is_trusted or (is_wrong and is_first and not self.was_wrong):
            # The others were measured under the same conditions.
            self._factors[~self._is_certain] += change
        elif abs(change) > _NOISE:
            self._factors[cell] += change
        self._is_certain[cell], self._decided[cell] = True, self._factors[cell]
        self.was_wrong = self.was_wrong or is_wrong
        if self.was_wrong:
            self._interpolate(row)
        return True

    def _interpolate(self, row: int) -> None:
        """Correct the undecided costs of a size as the decided ones were."""
        known = np.flatnonzero(self._is_certain[row])
        every = np.arange(self._factors.shape[1])
        self._factors[row] = np.interp(every, known, self._factors[row, known])

    def _check(self, cell: tuple[int, int]) -> None:
        """If a cell has moved far since its guess was replaced, treat the others as guesses again:
        they have probably moved too."""
        change = self._factors[cell] - self._decided[cell]
        if not abs(change) > _LAPSE:  # NaN if undecided
            return
        self._decided[cell] = self._factors[cell]
        others = self._is_certain.copy()
        others[cell] = False
        self._factors[others] += (1 - _SHARED) * change
        self._is_certain[others] = False
        self._wanted.clear()

    def _index(self, num_reqs: int) -> int:
        """The row of the smallest size of at least `num_reqs`, or of the largest size."""
        return min(bisect_left(self._sizes, num_reqs), len(self._sizes) - 1)

    def _corrected(self, index: int) -> np.ndarray:
        corrected: np.ndarray = self._seconds[index] * np.exp(self._factors[index])
        if self.was_wrong:  # more drafts cost at least as much
            np.maximum.accumulate(corrected, out=corrected)
        return corrected


def _fill_row(size: int, measured: Mapping[tuple[int, int], float], max_drafts: int) -> np.ndarray:
    """Seconds for K = 0 .. max_drafts: measured, interpolated, or extrapolated by the cost model.

    More drafts never cost less. If a measurement says so, fewer drafts were measured too dear, as
    other work only makes a step longer.
    """
    points = {k: t for (n, k), t in measured.items() if n == size and k <= max_drafts}
    known = sorted(points)
    values = np.minimum.accumulate([points[k] for k in known][::-1])[::-1]
    row = np.interp(range(max_drafts + 1), known, values)
    for k in range(max_drafts + 1):
        nearest = min(max(k, known[0]), known[-1])
        if nearest != k:
            row[k] *= assumed_seconds(size, k) / assumed_seconds(size, nearest)
    return row
