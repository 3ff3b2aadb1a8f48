"""Estimates what drafts cost in a step that also computes prompts.

A decode step waits for memory while arithmetic units idle, so verifying a few drafts costs little.
The rows of prompts fill that idle time, whatever is drafted. Beside many of them each row of a
draft costs its arithmetic in full.

With m seconds of reading and c seconds of arithmetic for each row, R rows take about V(R), a soft
maximum of m and c R. N requests with k drafts have R = N (1 + k) rows, and P rows of prompts add

    V(R + P) - V(R)

to the measured duration of the step without prompts. What they add to a step without drafts is not
the drafts' cost: those prompts must be computed in any case, and a longer step only brings more of
them. So that part is deducted from every k, and a K is chosen at the price that time has in a step
without prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

_SHARPNESS = (
    3.0  # of the soft maximum; the steps of an 8B model that were measured on an H100 fit it
)
_RATE = 0.1  # share of the log of a prediction's error by which c moves
_OUTLIER = 0.7  # larger errors count as this


class PromptRows:
    """Follows c, the seconds of arithmetic for each row."""

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        """`measured`: (requests, drafts of each) -> seconds of a step without prompts. The step
        with the cheapest rows bounds c; without any step, c is unknown at first."""
        each = [seconds / (size * (1 + k)) for (size, k), seconds in measured.items()]
        self.seconds_per_row: float | None = min(each, default=None)

    def beside(self, seconds: np.ndarray, num_reqs: int, num_prompt_rows: float) -> np.ndarray:
        """The costs of a step of N requests by number of drafts, beside rows of prompts, [K + 1].

        seconds: [K + 1], without prompts.
        """
        if not num_prompt_rows or self.seconds_per_row is None:
            return seconds
        added = self._added(float(seconds[0]), num_reqs, np.arange(len(seconds)), num_prompt_rows)
        costs: np.ndarray = seconds + (added - added[0])
        return costs

    def learn(
        self,
        seconds: float,
        alone: np.ndarray,
        num_reqs: int,
        num_drafts: float,
        num_prompt_rows: int,
    ) -> None:
        """Learn c from the duration of a step with prompts.

        alone: [K + 1] its estimated duration without prompts, by number of drafts.
        """
        rows = num_reqs * (1 + num_drafts) + num_prompt_rows
        if self.seconds_per_row is None:
            self.seconds_per_row = seconds / rows
            return
        without = float(np.interp(num_drafts, np.arange(len(alone)), alone))
        first = float(alone[0])
        added = float(self._added(first, num_reqs, np.array(num_drafts), num_prompt_rows))
        wrong = math.log(max(seconds, 1e-9) / (without + added))
        # A step that waits for memory says nothing about arithmetic.
        busy = min(1.0, self.seconds_per_row * rows / (without + added)) ** _SHARPNESS
        self.seconds_per_row *= math.exp(_RATE * busy * min(max(wrong, -_OUTLIER), _OUTLIER))

    def _added(
        self, first: float, num_reqs: int, num_drafts: np.ndarray, num_prompt_rows: float
    ) -> np.ndarray:
        """V(R + P) - V(R) by number of drafts; `first` is the duration without drafts."""
        assert self.seconds_per_row is not None
        each, rows = self.seconds_per_row, num_reqs * (1 + num_drafts)
        # m follows from V(N), the step without drafts.
        reading = max(0.0, first**_SHARPNESS - (each * num_reqs) ** _SHARPNESS)

        def duration(count: np.ndarray) -> np.ndarray:
            total: np.ndarray = (reading + (each * count) ** _SHARPNESS) ** (1 / _SHARPNESS)
            return total

        added: np.ndarray = duration(rows + num_prompt_rows) - duration(rows)
        return added
