"""Owns what a step takes, in seconds, by its number of requests and of drafts per request.

It begins with what was measured at start-up, fills the rest by interpolation, and follows the
measured time of real steps. It knows nothing about acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from statistics import median_low

import numpy as np

# Assumed until steps were measured: a step takes as long as so many rows whatever is in it, then a
# row for each token, and a share of both more where it verifies. Only the proportions matter, as
# the unit comes with the first real step.
_FIXED_ROWS, _VERIFY_COST = 11.0, 0.1
_RATE = 0.1  # how far one step's time moves its cell; a tenth of the difference
_SHARED = 0.3  # of that, what every other cell moves too: a longer context slows them all
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of requests that have cells of their own
_OUTLIER = 0.2  # a step that differs by more (in logarithms) counts as differing by this
_ENOUGH = 4  # real steps that decide what a cell takes whose measurement is no more than a guess
_LAPSE = 0.4  # a cell that moved by more since (in logarithms) makes guesses of the others again


def assumed_seconds(num_reqs: float, num_drafts: float) -> float:
    """What a step takes where nothing was measured, in units of one row."""
    verify = _VERIFY_COST * (_FIXED_ROWS + num_reqs) if num_drafts else 0.0
    return _FIXED_ROWS + num_reqs * (1 + num_drafts) + verify


def _assumed_row(num_reqs: int, max_drafts: int) -> np.ndarray:
    """`assumed_seconds` by number of drafts, [K + 1]."""
    return np.array([assumed_seconds(num_reqs, k) for k in range(max_drafts + 1)])


class StepCosts:
    """Seconds of a step of N requests with K drafts each; K may be a mean."""

    def __init__(
        self,
        measured: Mapping[tuple[int, int], float],
        max_drafts: int,
        is_trusted: bool = True,
    ) -> None:
        """`measured`: (N, K) -> seconds, any subset; empty means the assumption, scaled later.

        Not `is_trusted`: other work disturbs this machine and may come and go, so that what was
        measured is a guess, which a few real steps decide.
        """
        sizes = sorted({size for size, _ in measured})
        self._known = bool(measured)
        rows = [_fill_row(size, measured, max_drafts) for size in sizes]
        # Beyond what was measured the proportions are assumed.
        scale = rows[-1] / _assumed_row(sizes[-1], max_drafts) if sizes else 1.0
        for size in [size for size in _SIZES if not sizes or size > sizes[-1]]:
            sizes.append(size)
            rows.append(scale * _assumed_row(size, max_drafts))
        self._sizes = sizes
        self._seconds = np.array(rows)  # [sizes, K + 1]
        self._factors = np.zeros_like(self._seconds)  # logarithms, learned from real steps
        self.is_trusted = is_trusted
        self._is_certain = np.full(self._seconds.shape, is_trusted)
        self._wanted: dict[tuple[int, int], list[float]] = defaultdict(list)  # factors of guesses
        self._decided = np.full(self._seconds.shape, np.nan)  # the factors they got
        self.num_learned = 0  # real steps that told something of a guess

    def row(self, num_reqs: int) -> np.ndarray:
        """Seconds of a step of N requests by number of drafts, [K + 1]."""
        index = bisect_left(self._sizes, num_reqs)
        if index == len(self._sizes):  # beyond the largest: in proportion to the requests
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
        return float(np.interp(num_drafts, np.arange(len(row)), row))

    def is_certain(self, num_reqs: int, num_drafts: int) -> bool:
        """Whether real steps, or a measurement that is trusted, say what such a step takes."""
        return bool(self._is_certain[self._index(num_reqs), num_drafts])

    def refine(
        self, num_reqs: int, num_drafts: float, seconds: float, steady: int | None = None
    ) -> None:
        """Take in how long a real step took; rare outliers change little.

        steady: the step's K if it made as many drafts as it verified; only such steps decide what
        was guessed, as others have a part of each.
        """
        if seconds <= 0:
            return
        difference = float(np.log(seconds / self.seconds(num_reqs, num_drafts)))
        if not self._known:  # the assumption has no unit
            self._factors += difference
            self._known = True
            return
        index = self._index(num_reqs)
        rows = [index, index - 1] if index and num_reqs < self._sizes[index] else [index]
        if steady is not None:
            guessed = [(row, steady) for row in rows if not self._is_certain[row, steady]]
            for cell in guessed:
                self._learn(cell, float(self._factors[cell]) + difference)
            if guessed:
                return
        step = _RATE * min(max(difference, -_OUTLIER), _OUTLIER)
        shared = np.where(self._is_certain, _SHARED * step, step)
        for row in rows:
            shared[row, round(num_drafts)] = step
        self._factors += shared
        for row in rows:
            if self._is_certain[row, round(num_drafts)]:
                self._check((row, round(num_drafts)))

    def _learn(self, cell: tuple[int, int], factor: float) -> None:
        """A real step of a cell that is a guess asks for this factor.

        What is still a guess was measured in the same circumstances, so it moves along.
        """
        self.num_learned += 1
        wanted = self._wanted[cell]
        wanted.append(factor)
        if len(wanted) < _ENOUGH:
            return
        change = median_low(wanted) - self._factors[cell]
        wanted.clear()
        self._factors[~self._is_certain] += change
        self._is_certain[cell] = True
        self._decided[cell] = self._factors[cell]

    def _check(self, cell: tuple[int, int]) -> None:
        """Where a cell has moved far since it was decided, so have, unseen, the others."""
        change = self._factors[cell] - self._decided[cell]
        if not abs(change) > _LAPSE:  # it is not a number where all is trusted
            return
        self._decided[cell] = self._factors[cell]
        others = self._is_certain.copy()
        others[cell] = False
        self._factors[others] += (1 - _SHARED) * change
        self._is_certain[others] = False
        self._wanted.clear()

    def _index(self, num_reqs: int) -> int:
        """The row of the smallest size that holds so many requests, or of the largest."""
        return min(bisect_left(self._sizes, num_reqs), len(self._sizes) - 1)

    def _corrected(self, index: int) -> np.ndarray:
        corrected: np.ndarray = self._seconds[index] * np.exp(self._factors[index])
        return corrected


def _fill_row(size: int, measured: Mapping[tuple[int, int], float], max_drafts: int) -> np.ndarray:
    """Seconds for K = 0 .. max: measured, between two of them in proportion, beyond as assumed.

    More drafts never take less time: a measurement that says so was disturbed.
    """
    points = {k: t for (n, k), t in measured.items() if n == size and k <= max_drafts}
    known = sorted(points)
    values = np.maximum.accumulate([points[k] for k in known])
    row = np.interp(range(max_drafts + 1), known, values)
    for k in range(max_drafts + 1):
        nearest = min(max(k, known[0]), known[-1])
        if nearest != k:
            row[k] *= assumed_seconds(size, k) / assumed_seconds(size, nearest)
    return row
