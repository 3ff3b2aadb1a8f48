"""Decides how many drafts of a request are worth verifying, where every verified row costs time.

On a CPU a step with drafts takes longer than one without, so drafts that are rarely accepted make a
request slower. A budget follows each request's own share of accepted drafts and cuts drafts whose
chance is below their price. It is plain host state: only for devices whose tensors the host reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# A draft costs one more row of the step. Beside a single request that is about a twentieth of the
# step; the more rows a step has, the more a row costs and the less the step's fixed part matters.
# The price is about twice the cost, as an estimate of few drafts errs.
_PRICE, _PRICE_PER_REQUEST, _MAX_PRICE = 0.12, 0.03, 0.4
# Before a request has drafted, it counts as one accepted draft of two.
_FIRST_ACCEPTED, _FIRST_JUDGED = 1.0, 2.0
_MEMORY = 0.85  # weight that a judged draft keeps when another one is judged
_MAX_RATE = 0.97
_PROBE_EVERY = 4  # of the steps that could draft but are not worth it, one has a single draft


class DraftBudget:
    """The accepted share of every request's drafts; rows are slots."""

    def __init__(self, max_num_reqs: int) -> None:
        self._accepted = np.full(max_num_reqs, _FIRST_ACCEPTED)
        self._judged = np.full(max_num_reqs, _FIRST_JUDGED)  # the first rejected draft is the last
        self._skipped = np.zeros(max_num_reqs, dtype=np.int64)

    def restart(self, slot: int) -> None:
        """A new request has the slot."""
        self._accepted[slot], self._judged[slot] = _FIRST_ACCEPTED, _FIRST_JUDGED
        self._skipped[slot] = 0

    def record(self, slot: int, num_accepted: int, num_rejected: int) -> None:
        """One step's verdict on the request's drafts; those after a rejected one are not judged."""
        judged = num_accepted + min(num_rejected, 1)
        kept = _MEMORY**judged
        self._accepted[slot] = self._accepted[slot] * kept + num_accepted
        self._judged[slot] = self._judged[slot] * kept + judged

    def limit(self, slot: int, num_reqs: int) -> int:
        """How many of the drafts that were found for the request are worth their price in a step of
        `num_reqs` requests; call it once for each step that could draft."""
        price = min(_MAX_PRICE, _PRICE + _PRICE_PER_REQUEST * (num_reqs - 1))
        rate = min(self._accepted[slot] / self._judged[slot], _MAX_RATE)
        if rate < price:
            self._skipped[slot] += 1
            return int(self._skipped[slot] % _PROBE_EVERY == 0)
        # draft k is reached and accepted with the chance rate^k
        return max(1, int(math.log(price) / math.log(rate)))

    def limits(self, slots: Sequence[int], shared: Sequence[bool]) -> np.ndarray:
        """`limit` for the rows of a step, [N]. Where `shared` is false the price is that of a step
        of one request: what is drafted then depends on the request alone."""
        sizes = [len(slots) if share else 1 for share in shared]
        return np.array([self.limit(s, n) for s, n in zip(slots, sizes, strict=True)], np.int64)
