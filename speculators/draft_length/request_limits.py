"""Chooses K for each request, where rows without a draft are free.

That holds for n-gram drafts on a CPU: they cost nothing to make, a step is as long as its real
rows, and requests differ (a copy has nearly all drafts accepted, a story none).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .acceptance import Acceptance
from .step_costs import StepCosts, assumed_row

_LEAST_GAIN = 1.05  # drafts must promise this much more speed, as estimates of few drafts err
_MEMORY = 0.9  # weight that a judged draft keeps when another one is judged
# Of the steps for which drafts do not pay, one in this many makes a single draft, as a probe.
_FIRST_GAP, _MAX_GAP = 4, 64


class RequestLimits:
    """The number of drafts of each request; arrays are indexed by slot.

    When a request's row r is planned, the verdicts on its rows up to r - 2 are known, however many
    steps are in flight. No later verdict is used, so that the drafts of a request which must not
    depend on its company do not depend on when results arrive either.
    """

    def __init__(self, max_num_reqs: int, max_drafts: int, costs: StepCosts) -> None:
        self._costs = costs
        self._alone = assumed_row(1, max_drafts)  # [K + 1] cost of a step with one request
        self._acceptance = Acceptance(max_num_reqs, max_drafts, _MEMORY, pooled=False)
        self._is_greedy = np.ones(max_num_reqs, dtype=bool)
        self._skipped = np.zeros(max_num_reqs, dtype=np.int64)  # steps since drafts paid
        self._gap = np.full(max_num_reqs, _FIRST_GAP)
        self._planned = [0] * max_num_reqs  # rows planned
        self._applied = [0] * max_num_reqs  # verdicts used
        # Verdicts not used yet: (drafted, accepted) of each row.
        self._verdicts: list[deque[tuple[int, int]]] = [deque() for _ in range(max_num_reqs)]

    def restart(self, slot: int, greedy: bool) -> None:
        """A new request has the slot; `greedy`: its temperature is 0."""
        self._acceptance.restart(slot)
        self._is_greedy[slot] = greedy
        self._skipped[slot], self._gap[slot] = 0, _FIRST_GAP
        self._planned[slot] = self._applied[slot] = 0
        self._verdicts[slot].clear()

    def observe(
        self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Take in the verdicts of one step; those of no drafts, too."""
        for slot, count, right in zip(slots, drafted, accepted, strict=True):
            self._verdicts[slot].append((count, right))

    def choose(self, slots: Sequence[int], num_prompt_rows: float = 0.0) -> np.ndarray:
        """The number of drafts that each request should make next, [N]; call once for each step."""
        self._apply(slots)
        index = np.asarray(slots, dtype=np.int64)
        # The text of a request with a temperature depends on what was drafted for it, so its drafts
        # may not depend on the size of the batch. Greedy text does not depend on drafts.
        greedy = self._is_greedy[index][:, None]
        costs = self._costs.beside(len(slots), num_prompt_rows)
        seconds = np.where(greedy, costs, self._alone)  # [N, K + 1]
        gains = self._acceptance.expected_tokens(slots) * seconds[:, :1] / seconds
        best = gains.argmax(axis=1)
        pays = (best > 0) & (gains.max(axis=1) > _LEAST_GAIN)
        skipped = np.where(pays, 0, self._skipped[index] + 1)
        gap = np.where(pays, _FIRST_GAP, self._gap[index])
        self._skipped[index], self._gap[index] = skipped, gap
        # A probe goes on until its single draft was made and judged.
        return np.where(pays, best, skipped >= gap)

    def _apply(self, slots: Sequence[int]) -> None:
        while due := [slot for slot in slots if self._is_due(slot)]:
            found = [(slot, *self._verdicts[slot].popleft()) for slot in due]
            for slot in due:
                self._applied[slot] += 1
            if judged := [row for row in found if row[1]]:
                index, drafted, accepted = np.array(judged).T
                self._acceptance.observe(index, drafted, accepted)
                probed = index[self._skipped[index] >= self._gap[index]]
                self._skipped[probed] = 0
                self._gap[probed] = np.minimum(2 * self._gap[probed], _MAX_GAP)
        for slot in slots:
            self._planned[slot] += 1

    def _is_due(self, slot: int) -> bool:
        return bool(self._verdicts[slot]) and self._applied[slot] <= self._planned[slot] - 2
