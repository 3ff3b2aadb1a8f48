"""Decides when to draft only to learn: whether drafts pay again, or what a step with K costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .step_costs import StepCosts

# While nothing is drafted, a probe that verifies this many rows checks now and then whether that is
# still right. It may cost this share of the time, and each probe in vain makes the next one rarer.
# Few rows, but often: when drafts begin to pay, every step until that is noticed is lost.
_PROBE_ROWS, _PROBE_SHARE = 6, 0.0075
_MIN_GAP, _MAX_GAP = 4, 24  # steps between probes
_RECENT = 16  # steps within which drafting that begins is the doing of a probe
_LEAST_LOSS = 0.02  # least cost of a probing step, in steps without drafts
# Drafting that a probe started was in vain if it ends within this many steps: what was believed of
# later positions, which a probe does not judge, was wrong. It may cost the same share of the time.
LASTING = 48
# A K whose cost no real step has decided is tried for this many steps if it may pay, every
# `_TRIAL_GAP` steps, or less often where such steps teach nothing, for example because they hold
# prompts. One step fewer both makes and verifies K drafts.
_TRIAL_STEPS, _TRIAL_GAP, _MAX_TRIAL_GAP = 4, 16, 256
_LEAST_GAIN = 1.03  # a K may pay if it promises this much more than the best K with a decided cost
_DOUBT = 0.4  # share of a trusted measurement by which it may be too long
# Such trials may cost this share of the time; more once a measurement was wrong.
_TRIAL_SHARE, _SHARE_IF_WRONG = 0.01, 0.03


class Probe:
    """When to draft although drafts do not seem to pay."""

    def __init__(self) -> None:
        self.begins = False  # whether the last step that `is_due` accepted is the first of a probe
        self._gap, self._waited, self._left = 0, 0, 0
        self._since = _RECENT  # steps without drafts since the last probe
        self._vain = 0.0  # steps to wait to make up for the last drafting

    def is_due(self, num_reqs: int, lost: float) -> bool:
        """Whether this step probes. Call once for each step for which drafts do not seem to pay.

        `lost`: the estimated loss by one draft per request, in steps without drafts.
        """
        self.begins = False
        if self._left:
            self._left -= 1
            return True
        self._waited += 1
        self._since += 1
        steps = -(-_PROBE_ROWS // num_reqs)
        least = steps * max(lost, _LEAST_LOSS) / _PROBE_SHARE
        if self._waited < max(self._gap, _MIN_GAP, least, self._vain):
            return False
        self._waited, self._left, self._since, self.begins = 0, steps - 1, 0, True
        self._gap = min(max(2 * self._gap, _MIN_GAP), _MAX_GAP)
        self._vain = 0.0
        return True

    @property
    def is_recent(self) -> bool:
        """Whether a probe has ended so recently that drafting which begins now is its doing, and
        not that of a cost which turned out wrong."""
        return self._since < _RECENT

    def ended(self, num_steps: int, lost: float) -> None:
        """Drafting has ended after `num_steps`; each lost the share `lost` of its time."""
        self._waited, self._since = 0, _RECENT
        if num_steps >= LASTING:
            self._gap = 0
        else:
            self._vain = num_steps * lost / _PROBE_SHARE


class Trials:
    """Steps that measure the cost of a K that no real step has decided yet.

    A K that was measured too dear would otherwise never be chosen, and its cost never be corrected.
    """

    def __init__(self) -> None:
        self._gap, self._waited, self._left, self._tried = _TRIAL_GAP, 0, 0, 0
        self._num_learned = -1  # `StepCosts.num_learned` at the last trial

    def next(
        self,
        costs: StepCosts,
        num_reqs: int,
        seconds: np.ndarray,  # [K + 1] estimated cost of this step
        tokens: np.ndarray,  # [K + 1] expected tokens of this step
        allowed: Sequence[int],
    ) -> int | None:
        """The K that this step tries; None = none. Call once for each step."""
        if not costs.decides:
            return None
        if self._left and self._tried in allowed:
            self._left -= 1
            return self._tried
        self._left = 0
        self._waited += 1
        if self._waited < self._gap:
            return None
        known = [k for k in allowed if costs.is_certain(num_reqs, k)]
        if not known or len(known) == len(allowed):
            return None
        tried = _most_promising(known, seconds, tokens, allowed, costs.is_trusted)
        if tried is None:
            return None
        if costs.is_trusted:
            speed = tokens / seconds
            lost = _TRIAL_STEPS * (1.0 - float(speed[tried] / speed[known].max()))
            share = _SHARE_IF_WRONG if costs.was_wrong else _TRIAL_SHARE
            if self._waited * share < lost:
                return None
        in_vain = costs.num_learned == self._num_learned
        self._gap = min(2 * self._gap, _MAX_TRIAL_GAP) if in_vain else _TRIAL_GAP
        self._num_learned = costs.num_learned
        self._waited, self._left, self._tried = 0, _TRIAL_STEPS - 1, tried
        return tried


def _most_promising(
    known: Sequence[int],
    seconds: np.ndarray,
    tokens: np.ndarray,
    allowed: Sequence[int],
    is_trusted: bool,
) -> int | None:
    """A K with an undecided cost that could be the best, as it costs at least as much as fewer
    drafts, and if `is_trusted` at least its measurement less `_DOUBT`.

    Of several, the one with the most speed at that cost. Guesses promise nothing, so the smallest
    is tried first, which bounds the cost of the others.
    known: each K with a decided cost; seconds, tokens: [K + 1].
    """
    most = _LEAST_GAIN * max([float(tokens[k] / seconds[k]) for k in known])
    found = None
    for k in allowed:
        if k in known:
            continue
        least = max([float(seconds[j]) for j in known if j < k], default=0.0)
        if is_trusted:
            least = max(least, (1.0 - _DOUBT) * float(seconds[k]))
        if tokens[k] > most * least:
            if not is_trusted:
                return k
            found, most = k, float(tokens[k] / least)
    return found
