"""Estimates the probability that a draft is accepted, by position and by request.

A draft is judged if all drafts before it were accepted, so every probability is conditional on
that. Rows of the per-request arrays are slots. Host numbers only; it never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FIRST_RATE = 0.6  # prior of a drafter without observations
_PRIOR = 6.0  # judged drafts that the prior, or the position before, counts as
_DEEPER = 0.97  # prior of a position, as a share of the rate of the position before
# A verdict's weight falls to 1 / e after this many further ones on its position, but not within
# this many steps.
_VERDICTS, _STEPS = 100.0, 16.0
_MIN_RATE, _MAX_RATE = 0.01, 0.985
_AFTER_A_PAUSE = 2.0  # judged drafts that all older ones count as when a probe begins
_ALONE_RATE, _ALONE_WEIGHT = 0.5, 2.0  # prior of a request that learns from its own drafts only


class Acceptance:
    """Acceptance rates: what all requests have in common, moved by what each has shown itself."""

    def __init__(
        self,
        max_num_reqs: int,
        max_drafts: int,
        memory: float,
        strength: float = 0.0,
        pooled: bool = True,
    ) -> None:
        """`memory`: the weight that a request's judged draft keeps when another one is judged.

        `strength`: how many judged drafts of a request the common rates count as. Without `pooled`
        there are no common rates: a request's estimate does not depend on other requests.
        """
        self._memory, self._strength, self._pooled = memory, strength, pooled
        self._first_weight = 0.0 if pooled else _ALONE_WEIGHT
        self._expected = _FIRST_RATE
        self._rates: np.ndarray | None = None  # cache of `rates`
        self._accepted = np.zeros(max_drafts)  # [K], decayed
        self._judged = np.zeros(max_drafts)  # [K], decayed
        self._excess = np.zeros(max_num_reqs)  # [R] accepted beyond the common rates, decayed
        self._weight = np.full(max_num_reqs, self._first_weight)  # [R] judged, decayed

    def restart(self, slot: int) -> None:
        """Forget the request that had the slot."""
        self._excess[slot], self._weight[slot] = 0.0, self._first_weight

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from one step: arrays [N], every `drafted` at least 1, no slot twice."""
        right = np.minimum(accepted, drafted)
        judged = np.minimum(right + 1, drafted)
        expected = np.zeros(len(self._judged) + 1)
        self.rates().cumsum(out=expected[1:])
        kept = self._memory**judged
        self._excess[slots] = self._excess[slots] * kept + right - expected[judged]
        self._weight[slots] = self._weight[slots] * kept + judged
        if not self._pooled:
            return
        position = np.arange(len(self._judged))
        decay = np.exp(-1.0 / max(_VERDICTS / len(slots), _STEPS))
        self._accepted = self._accepted * decay + (position < right[:, None]).sum(0)
        self._judged = self._judged * decay + (position < judged[:, None]).sum(0)
        self._rates = None

    def fade(self, slots: Sequence[int]) -> None:
        """Give old observations little weight, because time has passed since the last drafts.

        What these requests have in common becomes the common prior. The rate of the first position
        stays; rates of later positions, which may have changed, move towards it.
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
        """The common rate of each position, [K]."""
        if not self._pooled:
            return np.full(len(self._judged), _ALONE_RATE)
        if self._rates is None:
            rates, expected = [], self._expected
            counts = zip(self._accepted.tolist(), self._judged.tolist(), strict=True)
            for accepted, judged in counts:
                rates.append((accepted + _PRIOR * expected) / (judged + _PRIOR))
                expected = _DEEPER * rates[-1]
            self._rates = np.array(rates)
        return self._rates

    def expected_tokens(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens that a step is expected to yield for each request, by number of drafts:
        [N, K + 1]."""
        index = np.asarray(slots, dtype=np.int64)
        own = self._excess[index] / (self._weight[index] + self._strength)
        # [N, K]; `np.clip` takes several times as long for so few numbers
        rates = np.minimum(np.maximum(self.rates() + own[:, None], _MIN_RATE), _MAX_RATE)
        tokens = np.ones((len(index), rates.shape[1] + 1))
        tokens[:, 1:] += rates.cumprod(1).cumsum(1)
        return tokens
