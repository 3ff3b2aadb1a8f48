"""Decides how many drafts of a request are worth verifying, where every verified row costs time.

On a CPU a step with drafts takes longer than one without, so drafts that are rarely accepted make a
request slower. A budget follows each request's own share of accepted drafts and cuts drafts whose
chance is below their price. It is plain host state: only for devices whose tensors the host reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Measured with a 135M model on two cores: a step of M rows takes about as long as 11 + M rows, and
# one that verifies drafts a tenth of a request's share more.
_FIXED_ROWS, _VERIFY_COST = 11, 0.1
_LEAST_GAIN = 1.05  # an estimate of few drafts errs
# Before a request has drafted, it counts as one accepted draft of two.
_FIRST_ACCEPTED, _FIRST_JUDGED = 1.0, 2.0
_MEMORY = 0.9  # weight that a judged draft keeps when another one is judged
_MAX_RATE = 0.97
# Of the steps that could draft but are not worth it, one in so many has a single draft.
_FIRST_GAP, _MAX_GAP = 4, 64


class DraftBudget:
    """The accepted share of every request's drafts; rows are slots."""

    def __init__(self, max_num_reqs: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts  # K
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
        kept = _MEMORY**judged
        self._accepted[slot] = self._accepted[slot] * kept + num_accepted
        self._judged[slot] = self._judged[slot] * kept + judged

    def limit(self, slot: int, num_reqs: int) -> int:
        """How many of the drafts that were found for the request are worth their time in a step of
        `num_reqs` requests; call it once for each step that could draft."""
        rate = min(self._accepted[slot] / self._judged[slot], _MAX_RATE)
        best = _most_worth(float(rate), num_reqs, self._num_drafts)
        if best:
            self._gap[slot] = _FIRST_GAP
            return best
        self._skipped[slot] += 1
        if self._skipped[slot] < self._gap[slot]:
            return 0
        self._skipped[slot], self._gap[slot] = 0, min(2 * self._gap[slot], _MAX_GAP)
        return 1

    def limits(self, slots: Sequence[int], shared: Sequence[bool]) -> np.ndarray:
        """`limit` for the rows of a step, [N]. Where `shared` is false the step counts as one of
        that request alone: what is drafted then depends on nothing else."""
        sizes = [len(slots) if share else 1 for share in shared]
        return np.array([self.limit(s, n) for s, n in zip(slots, sizes, strict=True)], np.int64)


def _most_worth(rate: float, num_reqs: int, num_drafts: int) -> int:
    """The number of drafts that brings most tokens for the time of a request's share of the step,
    if each is accepted with the chance `rate` after those before it; 0 if none gains enough."""
    per_draft = num_reqs / (_FIXED_ROWS + num_reqs)  # the share is (11 + N) / N rows
    best, best_gain, tokens = 0, _LEAST_GAIN, 1.0
    for count in range(1, num_drafts + 1):
        tokens += rate**count
        gain = tokens / (1 + _VERIFY_COST + per_draft * count)
        if gain > best_gain:
            best, best_gain = count, gain
    return best
