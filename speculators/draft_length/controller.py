"""Chooses K, the number of drafts, so that a step yields the most tokens per second.

    if no request of the step wants drafts:              0             requests
    if the watchdog has stopped the drafter:             0             unhealthy
    if the watchdog lets it try again:                   the least K   health_probe
    if K is fixed or held:                               that K        fixed
    if rows without drafts are free:                     a K for each request (`request_limits`)
    speed[k] = tokens[k] / seconds[k]                    (`acceptance`, `step_costs`), where
        seconds[k] includes what k drafts add beside the step's prompts (`prompt_rows`)
    if a k that may be the best has a guessed cost:      that k        probe
    if K is 0 and a probe is due:                        the least K   probe
    if max(speed) exceeds speed[K] by the hysteresis:    K = argmax(speed)
    otherwise the present K                                            gain, no_gain

Both estimates are measured while serving, from numbers that the host has anyway. This module never
sees a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .acceptance import Acceptance
from .probes import LASTING, Probe, Trials
from .request_limits import RequestLimits
from .step_costs import StepCosts
from .watchdog import Watchdog

HYSTERESIS = 1.03  # another K must promise this much more speed than the present one
HYSTERESIS_OF_NONE = 1.005  # K = 0 must promise this much: drafting may not be slower than that
HYSTERESIS_BYPASS = 1.15  # switch K at once if the predicted speed-up exceeds this
DWELL = 12  # steps before K may change again, so that estimates of few drafts do not sway it
_MEMORY, _STRENGTH = 0.98, 16.0  # of a request's own acceptance


@dataclass(frozen=True)
class DraftLength:
    """How many drafts to make after a step, and why."""

    num_drafts: int  # K, for every request of the step
    reason: str  # fixed, gain, no_gain, probe, requests, unhealthy or health_probe
    limits: list[int] | None = None  # by request, where they differ; K is the largest


class DraftController:
    """Chooses K for every step of one engine. Per-request arrays are indexed by slot."""

    def __init__(
        self,
        choices: Sequence[int],
        max_num_reqs: int,
        costs: StepCosts,
        per_request: bool = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`choices`: the values of K above 0, ascending; a single one is fixed.

        `per_request`: rows without drafts are free, so each request gets a K of its own.
        """
        self.costs = costs
        self.watchdog = watchdog
        max_drafts, is_fixed = choices[-1], len(choices) == 1
        self._max_drafts = max_drafts
        self._held: int | None = max_drafts if is_fixed else None  # K, if nothing is chosen
        self._choices = np.array([0, *choices])
        self._max_num_reqs = max_num_reqs
        self._caps = np.full(max_num_reqs, max_drafts)
        self._requests: RequestLimits | None = None
        if per_request and not is_fixed:
            self._requests = RequestLimits(max_num_reqs, max_drafts, costs)
        self._trials = Trials()
        self._start()

    def _start(self) -> None:
        self._acceptance = Acceptance(self._max_num_reqs, self._max_drafts, _MEMORY, _STRENGTH)
        self._current = self._max_drafts
        self._stayed = DWELL  # steps since K changed
        self._num_drafting = LASTING  # steps since drafting began
        self._probe = Probe()

    def new_drafter(self) -> None:
        """Forget all acceptance, because the drafter's weights have changed."""
        self._start()
        if self.watchdog is not None:
            self.watchdog.new_drafter()

    def hold(self, num_drafts: int | None) -> None:
        """Fix K at 0 or one of `choices`, whatever it yields; None: choose again."""
        assert num_drafts is None or num_drafts in self._choices
        self._held = num_drafts

    def restart(self, slot: int, cap: int | None, greedy: bool) -> None:
        """Forget the slot's last request: a new one has it.

        `cap`: the most drafts per step that the request wants; None = no limit, 0 or less = none.
        `greedy`: its temperature is 0. Otherwise a K of its own (`per_request`) may not depend on
        the size of the batch, because its text depends on its drafts.
        """
        self._caps[slot] = self._max_drafts if cap is None else min(max(cap, 0), self._max_drafts)
        self._acceptance.restart(slot)
        if self._requests is not None:
            self._requests.restart(slot, greedy)

    def choose(self, slots: Sequence[int], num_prompt_rows: float = 0.0) -> DraftLength:
        """How many drafts to make for the next step of these requests, 0 if there are none.

        `num_prompt_rows`: the tokens of prompts that it is expected to compute as well.
        Call it once for each step, because it counts steps and starts probes.
        """
        caps = self._caps[list(slots)]
        most = int(caps.max(initial=0))
        if not most:
            return DraftLength(0, "requests")
        health = "healthy" if self.watchdog is None else self.watchdog.state()
        if health == "off":
            return DraftLength(0, "unhealthy")
        if health == "probe":
            return DraftLength(int(self._choices[1]), "health_probe")
        if self._held is not None:
            return DraftLength(min(self._held, most), "fixed")
        if self._requests is not None:
            limits = np.minimum(self._requests.choose(slots, num_prompt_rows), caps).tolist()
            most = max(limits)
            return DraftLength(
                most, "probe" if most == 1 else "gain" if most else "no_gain", limits
            )
        return self._choose_uniform(slots, most, num_prompt_rows)

    def observe(
        self, slots: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn acceptance from one step's sampling rows, of different slots.

        `drafted`: the drafts that each row verified, or 0; `accepted`: how many were accepted.
        """
        if self._requests is not None:
            self._requests.observe(slots, drafted, accepted)
            return
        index, right = np.asarray(slots, dtype=np.int64), np.asarray(accepted)
        wanted = np.minimum(np.asarray(drafted), self._caps[index])
        some = wanted > 0
        if some.any():
            self._acceptance.observe(index[some], wanted[some], right[some])

    def tokens(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that a step of these requests is expected to yield, by number of drafts, [K + 1].

        A request's drafts beyond its cap yield none.
        """
        index = np.asarray(slots, dtype=np.int64)
        tokens, caps = self._acceptance.expected_tokens(index), self._caps[index]
        if caps.min(initial=self._max_drafts) < self._max_drafts:
            kept = np.minimum(np.arange(self._max_drafts + 1), caps[:, None])
            tokens = tokens[np.arange(len(index))[:, None], kept]
        total: np.ndarray = tokens.sum(0)
        return total

    def _choose_uniform(
        self, slots: Sequence[int], most: int, num_prompt_rows: float
    ) -> DraftLength:
        """One K, at most `most`, for all of these requests."""
        seconds, tokens = self.costs.beside(len(slots), num_prompt_rows), self.tokens(slots)
        speed = tokens / seconds  # [K + 1]
        allowed = self._choices[self._choices <= most]
        tried = self._trials.next(self.costs, len(slots), seconds, tokens, allowed.tolist())
        if tried is not None:
            return DraftLength(tried, "probe")
        lost = float(seconds[1] / seconds[0] - tokens[1] / tokens[0])
        if self._current == 0 and self._probe.is_due(len(slots), lost):
            if self._probe.begins:
                self._acceptance.fade(slots)
            return DraftLength(int(allowed[1]), "probe")
        best = int(allowed[np.argmax(speed[allowed])])
        present = min(self._current, int(allowed[-1]))
        self._stayed += 1
        self._num_drafting += 1
        if best != present and self._is_worth_changing(speed[best] / speed[present], best):
            if not best:
                self._probe.ended(self._num_drafting, 1.0 - float(speed[present] / speed[0]))
            elif not self._current:
                self._num_drafting = 0 if self._probe.is_recent else LASTING
            self._current, self._stayed = best, 0
            present = best
        return DraftLength(present, "gain" if present else "no_gain")

    def _is_worth_changing(self, gain: float, best: int) -> bool:
        least = HYSTERESIS if best else HYSTERESIS_OF_NONE
        return gain > HYSTERESIS_BYPASS or (self._stayed >= DWELL and gain > least)
