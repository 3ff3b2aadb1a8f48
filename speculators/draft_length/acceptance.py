"""Owns what became of drafts: the share accepted by position, of all requests and of each.

A draft is judged if all before it were accepted. Rows of the per-request arrays are slots. Plain
host numbers: it never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIRST_RATE = 0.6  # expected of a drafter nobody has seen draft
_PRIOR = 6.0  # judged drafts that this expectation, or the position before, counts as
_DEEPER = (
    0.97  # a position that was never judged is expected to do nearly as well as the one before
)
# A verdict counts 1 / e after so many further ones on its position, but not before so many steps.
_VERDICTS, _STEPS = 100.0, 16.0
_MIN_RATE, _MAX_RATE = 0.01, 0.985
_AFTER_A_PAUSE = 2.0  # judged drafts that all older ones count as when a probe begins


class Acceptance:
    """Chances of drafts, each given that those before it were accepted."""

    def __init__(self, max_num_reqs: int, max_drafts: int, memory: float, strength: float) -> None:
        """`memory`: weight that a request's judged draft keeps when another one is judged;
        `strength`: judged drafts that the global rates count as in a request's own."""
        self._memory, self._strength = memory, strength
        self._expected = _FIRST_RATE
        self._rates: np.ndarray | None = None  # what `rates` gave, until something changes
        self._accepted = np.zeros(max_drafts)  # [K], decayed
        self._judged = np.zeros(max_drafts)  # [K], decayed
        self._excess = np.zeros(max_num_reqs)  # [R] accepted beyond the global rates, decayed
        self._weight = np.zeros(max_num_reqs)  # [R] judged, decayed

    def restart(self, slot: int) -> None:
        """A new request has the slot."""
        self._excess[slot] = self._weight[slot] = 0.0

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """One step's verdicts, each array [N]; every `drafted` is at least 1."""
        right = np.minimum(accepted, drafted)
        judged = np.minimum(right + 1, drafted)
        expected = np.concatenate([[0.0], np.cumsum(self.rates())])
        kept = self._memory**judged
        self._excess[slots] = self._excess[slots] * kept + right - expected[judged]
        self._weight[slots] = self._weight[slots] * kept + judged
        position = np.arange(len(self._judged))
        decay = np.exp(-1.0 / max(_VERDICTS / len(slots), _STEPS))
        self._accepted = self._accepted * decay + (position < right[:, None]).sum(0)
        self._judged = self._judged * decay + (position < judged[:, None]).sum(0)
        self._rates = None

    def fade(self, slots: Sequence[int]) -> None:
        """What is known is old: let it weigh little against what comes next.

        What these requests have in common becomes what is expected of all. The first position's
        chance stays; that of a later one, which may have changed, moves towards it.
        """
        index = np.asarray(slots, dtype=np.int64)
        own = self._excess / (self._weight + self._strength)
        shared = float(own[index].mean())
        own[index] -= shared
        self._weight = np.minimum(self._weight, _AFTER_A_PAUSE)
        self._excess = own * (self._weight + self._strength)
        rates = np.clip(self.rates() + shared, _MIN_RATE, _MAX_RATE)
        self._expected = float(rates[0])
        self._judged = np.minimum(self._judged, _AFTER_A_PAUSE)
        self._accepted = rates * self._judged
        self._rates = None

    def rates(self) -> np.ndarray:
        """The global chance of each position, [K]."""
        if self._rates is None:
            rates, expected = [], self._expected
            counts = zip(self._accepted.tolist(), self._judged.tolist(), strict=True)
            for accepted, judged in counts:
                rates.append((accepted + _PRIOR * expected) / (judged + _PRIOR))
                expected = _DEEPER * rates[-1]
            self._rates = np.array(rates)
        return self._rates

    def request_rates(self, slots: Sequence[int]) -> np.ndarray:
        """The chance of each position for these requests, [N, K]: global, moved by their own."""
        index = np.asarray(slots, dtype=np.int64)
        own = self._excess[index] / (self._weight[index] + self._strength)
        rates: np.ndarray = np.clip(self.rates() + own[:, None], _MIN_RATE, _MAX_RATE)
        return rates
