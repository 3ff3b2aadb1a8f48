"""Decides how many drafts of each request are worth verifying, where rows without a draft are free.

So it is for n-gram drafts on a CPU: they cost nothing to make, a step is as long as its real rows,
and requests differ (a copy has nearly all drafts accepted, a story none). A budget follows each
request's own share of accepted drafts and cuts those whose chance is below their price.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .step_costs import StepCosts

_LEAST_GAIN = 1.05  # an estimate of few drafts errs
# Before a request has drafted, it counts as one accepted draft of two.
_FIRST_ACCEPTED, _FIRST_JUDGED = 1.0, 2.0
_MEMORY = 0.9  # weight that a judged draft keeps when another one is judged
_MAX_RATE = 0.97
# Of the steps for which drafts are not worth it, one in so many asks for a single draft.
_FIRST_GAP, _MAX_GAP = 4, 64


class DraftBudget:
    """The accepted share of every request's drafts; rows are slots."""

    def __init__(self, max_num_reqs: int, num_drafts: int, costs: StepCosts | None = None) -> None:
        """`costs` holds for requests that share a step; one that must not depend on its company
        is weighed by what can be assumed of a step of its own."""
        self._alone = StepCosts({}, num_drafts)
        self._shared = self._alone if costs is None else costs
        self._accepted = np.full(max_num_reqs, _FIRST_ACCEPTED)
        self._judged = np.full(max_num_reqs, _FIRST_JUDGED)  # the first rejected draft is the last
        self._skipped = np.zeros(max_num_reqs, dtype=np.int64)
        self._gap = np.full(max_num_reqs, _FIRST_GAP)

    def restart(self, slot: int) -> None:
        """A new request has the slot."""
        self._accepted[slot], self._judged[slot] = _FIRST_ACCEPTED, _FIRST_JUDGED
        self._skipped[slot], self._gap[slot] = 0, _FIRST_GAP

    def record(self, slot: int, num_accepted: int, num_rejected: int) -> None:
        """One step's verdict on the request's drafts; those after a rejected one are not judged."""
        judged = num_accepted + min(num_rejected, 1)
        if not judged:
            return
        kept = _MEMORY**judged
        self._accepted[slot] = self._accepted[slot] * kept + num_accepted
        self._judged[slot] = self._judged[slot] * kept + judged
        if self._skipped[slot] >= self._gap[slot]:  # the single draft was found, and judged
            self._skipped[slot], self._gap[slot] = 0, min(2 * self._gap[slot], _MAX_GAP)

    def limit(self, slot: int, num_reqs: int, shared: bool = True) -> int:
        """How many drafts of the request are worth their time in a step of `num_reqs` requests;
        call it once for each of its steps."""
        rate = min(self._accepted[slot] / self._judged[slot], _MAX_RATE)
        seconds = self._shared.row(num_reqs) if shared else self._alone.row(1)
        best = _most_worth(float(rate), seconds)
        if best:
            self._skipped[slot], self._gap[slot] = 0, _FIRST_GAP
            return best
        self._skipped[slot] += 1
        # Stays at one until such a draft is found.
        return int(self._skipped[slot] >= self._gap[slot])

    def limits(self, slots: Sequence[int], shared: Sequence[bool]) -> list[int]:
        """`limit` for the rows of a step. Where `shared` is false, what is drafted depends on
        nothing but the request."""
        return [self.limit(s, len(slots), share) for s, share in zip(slots, shared, strict=True)]


def _most_worth(rate: float, seconds: np.ndarray) -> int:
    """The number of drafts that brings most tokens for a request's share of the step's time, if
    each is accepted with the chance `rate` after those before it; 0 if none gains enough.

    seconds: [K + 1] a step by number of drafts.
    """
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(rate ** np.arange(1, len(seconds)))])
    gains = tokens * seconds[0] / seconds
    best = int(np.argmax(gains))
    return best if gains[best] > _LEAST_GAIN else 0
