"""Chooses K, the drafts of each step, so that a step brings most tokens for its time; 0 included.

It weighs what a step takes (`step_costs`) against what drafts bring (`acceptance`), both measured
while serving, from numbers that the host has anyway. It never sees a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .acceptance import Acceptance
from .draft_budget import DraftBudget
from .step_costs import StepCosts
from .watchdog import Watchdog

_LEAST_GAIN = 1.03  # another K must promise so much more than the present one
_LEAST_GAIN_OF_NONE = 1.005  # and none at all so much: nothing may be slower than no drafts
_LARGE_GAIN = 1.15  # what promises so much more does not wait
_STAY = 12  # steps a choice is kept, so that estimates of few drafts do not sway it
_MEMORY, _STRENGTH = 0.98, 16.0  # of a request's own acceptance
# While nothing is drafted, a probe of so many verified rows asks now and then whether that is
# still right; it may cost this share of the time, and is rarer the more of them were in vain. Few
# rows, but often: when drafts begin to pay, every step until it is noticed is lost.
_PROBE_ROWS, _PROBE_SHARE = 6, 0.0075
_MIN_GAP, _MAX_GAP = 16, 48
# A K whose cost is a guess and that may pay is tried for so many steps, every `_MIN_GAP`, or more
# seldom where such steps tell nothing: they hold prompts, say.
_TRIAL_STEPS, _MAX_TRIAL_GAP = 3, 1024
# Drafts that a probe led to were in vain if they end before so many steps: what was believed of
# later positions, which a probe does not judge, was wrong. They, too, may cost as large a share.
_LASTING = 48
_LEAST_LOSS = 0.02  # of a probing step, in steps without drafts


@dataclass(frozen=True)
class Choice:
    """How many drafts are to be made, and why."""

    num_drafts: int  # K, for every request of the step
    reason: str  # fixed, gain, no_gain, probe, requests, unhealthy or health_probe
    limits: list[int] | None = None  # by request, where they differ; K is the largest


class DraftController:
    """K of every step of one engine. Per-request arrays are indexed by slot."""

    def __init__(
        self,
        choices: Sequence[int],
        max_num_reqs: int,
        costs: StepCosts,
        per_request: bool = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`choices`: the K above 0, ascending; a single one is fixed. `per_request`: rows without
        drafts take no time."""
        self.costs = costs
        self.watchdog = watchdog
        max_drafts, is_fixed = choices[-1], len(choices) == 1
        self._max_drafts = max_drafts
        self._held: int | None = max_drafts if is_fixed else None  # K, if nothing is chosen
        self._choices = np.array([0, *choices])
        self._max_num_reqs = max_num_reqs
        self._acceptance = Acceptance(max_num_reqs, max_drafts, _MEMORY, _STRENGTH)
        self._caps = np.full(max_num_reqs, max_drafts)
        self._budget: _Budget | None = None
        if per_request and not is_fixed:
            self._budget = _Budget(max_num_reqs, max_drafts, costs)
        self._current = max_drafts
        self._stayed = _STAY  # steps since K was changed
        self._num_drafting = _LASTING  # steps since drafts were begun
        self._probe = _Probe()
        self._trials = _Trials()

    def new_drafter(self) -> None:
        """Begin anew with what is accepted: the drafter's weights are others."""
        self._acceptance = Acceptance(self._max_num_reqs, self._max_drafts, _MEMORY, _STRENGTH)
        self._current, self._stayed, self._probe = self._max_drafts, _STAY, _Probe()
        self._num_drafting = _LASTING
        if self.watchdog is not None:
            self.watchdog.new_drafter()

    def hold(self, num_drafts: int | None) -> None:
        """Make so many drafts, 0 or one of `choices`, whatever they bring; None: choose again."""
        assert num_drafts is None or num_drafts in self._choices
        self._held = num_drafts

    def restart(self, slot: int, cap: int | None, greedy: bool) -> None:
        """A new request has the slot; it wants at most `cap` drafts a step."""
        self._caps[slot] = self._max_drafts if cap is None else min(max(cap, 0), self._max_drafts)
        self._acceptance.restart(slot)
        if self._budget is not None:
            self._budget.restart(slot, greedy)

    def choose(self, slots: Sequence[int]) -> Choice:
        """How many drafts to make for the next step, which these requests will share."""
        if not slots:
            return Choice(0, "requests")
        caps = self._caps[list(slots)]
        most = int(caps.max())
        if not most:
            return Choice(0, "requests")
        health = "healthy" if self.watchdog is None else self.watchdog.state()
        if health == "off":
            return Choice(0, "unhealthy")
        if health == "probe":
            return Choice(int(self._choices[1]), "health_probe")
        if self._held is not None:
            return Choice(min(self._held, most), "fixed")
        if self._budget is not None:
            return self._budget.choose(slots, caps)
        return self._choose_uniform(slots, caps, most)

    def observe(
        self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What became of one step's sampling rows; `drafted` 0 where a row verified none."""
        if self._budget is not None:
            self._budget.observe(slots, drafted, accepted)
            return
        index, right = np.asarray(slots, dtype=np.int64), np.asarray(accepted)
        wanted = np.minimum(np.asarray(drafted), self._caps[index])
        if not wanted.all():
            some = wanted > 0
            index, wanted, right = index[some], wanted[some], right[some]
        if len(index):
            self._acceptance.observe(index, wanted, right)

    # --- one K for all --------------------------------------------------------------------------

    def tokens(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that a step of these requests is expected to bring, by number of drafts."""
        reached = np.cumprod(self._acceptance.request_rates(slots), axis=1)  # [N, K]
        wanted = np.arange(self._max_drafts) < self._caps[list(slots)][:, None]
        more = np.cumsum((reached * wanted).sum(0))
        return len(slots) + np.concatenate([[0.0], more])

    def _choose_uniform(self, slots: Sequence[int], caps: np.ndarray, most: int) -> Choice:
        seconds, tokens = self.costs.row(len(slots)), self.tokens(slots)
        speed = tokens / seconds  # [K + 1]
        allowed = self._choices[self._choices <= most]
        tried = self._trials.next(self.costs, len(slots), seconds, tokens, allowed.tolist())
        if tried is not None:
            return Choice(tried, "probe")
        lost = float(seconds[1] / seconds[0] - tokens[1] / tokens[0])
        if self._current == 0 and self._probe.is_due(len(slots), lost):
            if self._probe.begins:
                self._acceptance.fade(slots)
            return Choice(int(allowed[1]), "probe")
        best = int(allowed[np.argmax(speed[allowed])])
        present = min(self._current, int(allowed[-1]))
        self._stayed += 1
        self._num_drafting += 1
        if best != present and self._is_worth_changing(speed[best] / speed[present], best):
            if not best:
                lost = 1.0 - float(speed[present] / speed[0])
                self._probe.ended(self._num_drafting, lost)
            elif not self._current:
                self._num_drafting = 0
            self._current, self._stayed = best, 0
            present = best
        return Choice(present, "gain" if present else "no_gain")

    def _is_worth_changing(self, gain: float, best: int) -> bool:
        if gain > _LARGE_GAIN:
            return True
        return self._stayed >= _STAY and gain > (_LEAST_GAIN if best else _LEAST_GAIN_OF_NONE)


class _Probe:
    """When to draft although it does not seem to pay."""

    def __init__(self) -> None:
        self.begins = False
        self._gap, self._waited, self._left = 0, 0, 0
        self._vain = 0.0  # steps to wait for what the last drafts cost

    def is_due(self, num_reqs: int, lost: float) -> bool:
        """Whether this step, for which drafts do not seem to pay, probes. Call once a step.

        `lost`: what a step with one draft is believed to cost, in steps without drafts.
        """
        self.begins = False
        if self._left:
            self._left -= 1
            return True
        self._waited += 1
        steps = -(-_PROBE_ROWS // num_reqs)
        least = steps * max(lost, _LEAST_LOSS) / _PROBE_SHARE
        if self._waited < max(self._gap, _MIN_GAP, least, self._vain):
            return False
        self._waited, self._left, self.begins = 0, steps - 1, True
        self._gap = min(max(2 * self._gap, _MIN_GAP), _MAX_GAP)
        self._vain = 0.0
        return True

    def ended(self, num_steps: int, lost: float) -> None:
        """Drafts, made for so many steps, pay no more, or never did; `lost`: of a step's time."""
        self._waited = 0
        if num_steps >= _LASTING:
            self._gap = 0
        else:
            self._vain = num_steps * lost / _PROBE_SHARE


class _Trials:
    """Steps that show what a K takes whose cost is a guess: one that was guessed too dear would
    never be chosen, and so never be put right."""

    def __init__(self) -> None:
        self._gap, self._waited, self._left, self._tried = _MIN_GAP, 0, 0, 0
        self._num_learned = -1  # steps that told something, at the last trial

    def next(
        self,
        costs: StepCosts,
        num_reqs: int,
        seconds: np.ndarray,
        tokens: np.ndarray,
        allowed: Sequence[int],
    ) -> int | None:
        """The K that this step is to try, if any; call once a step.

        seconds, tokens: [K + 1] that such a step is believed to take and to bring.
        """
        if costs.is_trusted:
            return None
        if self._left and self._tried in allowed:
            self._left -= 1
            return self._tried
        self._left = 0
        self._waited += 1
        if self._waited < self._gap:
            return None
        known = [k for k in allowed if costs.is_certain(num_reqs, k)]
        tried = _first_that_may_pay(known, seconds, tokens, allowed)
        if tried is None:
            return None
        in_vain = costs.num_learned == self._num_learned
        self._gap = min(2 * self._gap, _MAX_TRIAL_GAP) if in_vain else _MIN_GAP
        self._num_learned = costs.num_learned
        self._waited, self._left, self._tried = 0, _TRIAL_STEPS - 1, tried
        return tried


def _first_that_may_pay(
    known: Sequence[int], seconds: np.ndarray, tokens: np.ndarray, allowed: Sequence[int]
) -> int | None:
    """The smallest K that is guessed and could be the best: it takes no less than fewer drafts.

    known: each K whose seconds are no guess; seconds, tokens: [K + 1].
    """
    best = max([float(tokens[k] / seconds[k]) for k in known], default=0.0)
    for k in allowed:
        if k not in known:
            least = max([float(seconds[j]) for j in known if j < k], default=0.0)
            if not least or tokens[k] / least > _LEAST_GAIN * best:
                return k
    return None


class _Budget:
    """K by request: what is known of a request when its row r is planned are its rows to r - 2.

    Those have landed, however many steps are in flight, so that the drafts of a request which must
    not depend on its company do not depend on when results come either.
    """

    def __init__(self, max_num_reqs: int, max_drafts: int, costs: StepCosts) -> None:
        self._budget = DraftBudget(max_num_reqs, max_drafts, costs)
        self._greedy = [True] * max_num_reqs
        self._planned = [0] * max_num_reqs
        self._applied = [0] * max_num_reqs
        self._verdicts: list[deque[tuple[int, int]]] = [deque() for _ in range(max_num_reqs)]

    def restart(self, slot: int, greedy: bool) -> None:
        self._budget.restart(slot)
        self._greedy[slot] = greedy
        self._planned[slot] = self._applied[slot] = 0
        self._verdicts[slot].clear()

    def observe(
        self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        for slot, count, right in zip(slots, drafted, accepted, strict=True):
            self._verdicts[slot].append((right, count - right))

    def choose(self, slots: Sequence[int], caps: np.ndarray) -> Choice:
        for slot in slots:
            self._apply(slot)
        # The text of a request with a temperature depends on what was drafted for it; greedy text
        # does not.
        wanted = self._budget.limits(slots, [self._greedy[slot] for slot in slots])
        limits = [min(limit, int(cap)) for limit, cap in zip(wanted, caps, strict=True)]
        most = max(limits)
        return Choice(most, "probe" if most == 1 else "gain" if most else "no_gain", limits)

    def _apply(self, slot: int) -> None:
        verdicts = self._verdicts[slot]
        while verdicts and self._applied[slot] <= self._planned[slot] - 2:
            right, wrong = verdicts.popleft()
            self._budget.record(slot, right, wrong)
            self._applied[slot] += 1
        self._planned[slot] += 1
