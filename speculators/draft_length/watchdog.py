"""Detects a drafter that seems broken, stops it, and lets it try again after a while.

Two signs stop it: no draft is accepted for long, or nearly all are accepted while the texts repeat
themselves. A third one, far fewer accepted drafts than before, only warns: texts of another kind
look the same, and the choice of K stops drafts that do not pay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

WINDOW = 200  # drafts that are judged together
_DROP = 0.2  # a window with less than this share of the running mean is a sudden drop
_LEAST_MEAN = 0.15  # don't report a drop if acceptance was already below this
_MEAN_WINDOWS = 5  # windows before the running mean counts
_MEAN_RATE = 0.1
_LOOP_RATE = 0.99  # an accepted share that is suspicious if the texts repeat themselves
_LOOP_TOKENS, _LONGEST_PERIOD = 96, 8
_PROBE_DRAFTS = 32
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 600.0  # seconds

SIGNS = ("zero", "drop", "loop")
_REASONS = {
    "zero": f"none of the last {WINDOW} drafts was accepted",
    "loop": "nearly every draft is accepted and the texts repeat themselves",
}


class Watchdog:
    """The health of one drafter: "healthy", "off", or "probe" (drafting a little to find out)."""

    def __init__(self, method: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_troubles = dict.fromkeys(SIGNS, 0)  # times each was detected; "drop" stops nothing
        self._method, self._clock = method, clock
        self._trouble = ""  # "" = healthy
        self._probing = False
        self._until, self._wait = 0.0, _FIRST_WAIT
        self._mean, self._num_windows = 0.0, 0
        self._drafted = self._accepted = 0  # of the present window
        self._in_vain = 0  # drafts since one was accepted

    @property
    def is_healthy(self) -> bool:
        """False from the time when the drafter is stopped until a probe succeeds.

        It stays False during a probe, although the drafter then makes a few drafts.
        """
        return not self._trouble

    def new_drafter(self) -> None:
        """Forget the acceptance of the previous drafter; the counts of troubles stay."""
        self._trouble, self._probing, self._wait = "", False, _FIRST_WAIT
        self._mean, self._num_windows = 0.0, 0
        self._drafted = self._accepted = self._in_vain = 0

    def state(self) -> str:
        """ "healthy": draft as usual; "off": do not draft; "probe": draft a little to find out.

        This call starts a probe when one is due; `observe` ends it.
        """
        if not self._trouble:
            return "healthy"
        if not self._probing and self._clock() >= self._until:
            self._probing = True
        return "probe" if self._probing else "off"

    @property
    def wants_texts(self) -> bool:
        """Whether `observe` should be given the newest tokens of the requests that drafted."""
        full = _PROBE_DRAFTS if self._probing else WINDOW
        suspicious = self._accepted >= _LOOP_RATE * self._drafted
        return suspicious and 2 * self._drafted >= full

    def observe(
        self, num_drafted: int, num_accepted: int, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        """Count a step's real drafts; this may stop the drafter or end a probe, which is logged.

        `texts`: the newest tokens of each request that drafted, if `wants_texts`. Without them, no
        loop is found.
        """
        if self._trouble and not self._probing:
            return  # made before the drafter was stopped
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._in_vain = 0 if num_accepted else self._in_vain + num_drafted
        if not self._probing and self._in_vain >= WINDOW:
            self._stop("zero", 0.0)
            return
        if self._drafted < (_PROBE_DRAFTS if self._probing else WINDOW):
            return
        rate = self._accepted / self._drafted
        self._drafted = self._accepted = 0
        loops = rate >= _LOOP_RATE and bool(texts) and all(is_loop(text) for text in texts)
        if self._probing:
            self._end_probe(rate, loops)
        elif loops:
            self._stop("loop", rate)
        elif self._dropped(rate):
            self._report_drop(rate)
        else:
            self._keep(rate)

    def _dropped(self, rate: float) -> bool:
        known = self._num_windows >= _MEAN_WINDOWS and self._mean >= _LEAST_MEAN
        return known and rate < _DROP * self._mean

    def _report_drop(self, rate: float) -> None:
        """Warn and count, and compare with the new rate from now on."""
        self.num_troubles["drop"] += 1
        logger.warning(
            "acceptance has dropped: %.0f %% of the last %d drafts were accepted%s (drafter %s). "
            "The texts may have changed, or the drafter is at fault; drafts go on where they pay",
            100 * rate, WINDOW, self._before(), self._method,
        )  # fmt: skip
        self._mean, self._num_windows = rate, 1

    def _keep(self, rate: float) -> None:
        self._num_windows += 1
        share = max(_MEAN_RATE, 1 / self._num_windows)
        self._mean += share * (rate - self._mean)
        self._wait = _FIRST_WAIT

    def _stop(self, trouble: str, rate: float) -> None:
        self._trouble, self._until = trouble, self._clock() + self._wait
        self._drafted = self._accepted = 0
        self.num_troubles[trouble] += 1
        logger.warning(
            "speculation is off for now: %s (drafter %s, %.0f %% accepted%s). Requests continue "
            "without drafts. In %.0f s a few drafts are tried; if they are accepted, speculation "
            "resumes",
            _REASONS[trouble], self._method, 100 * rate, self._before(), self._wait,
        )  # fmt: skip

    def _before(self) -> str:
        return f", {100 * self._mean:.0f} % before" if self._num_windows else ""

    def _end_probe(self, rate: float, loops: bool) -> None:
        self._probing = False
        if rate and not loops:
            logger.info(
                "speculation is on again: %.0f %% of the drafts of a probe were accepted",
                100 * rate,
            )
            self._trouble = ""
            return
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._until = self._clock() + self._wait
        logger.info(
            "speculation stays off: %.0f %% of the drafts of a probe were accepted%s%s; the next "
            "probe is in %.0f s",
            100 * rate, self._before(), " and the texts repeat themselves" if loops else "",
            self._wait,
        )  # fmt: skip


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether the last `_LOOP_TOKENS` tokens repeat a sequence of at most `_LONGEST_PERIOD`.

    False if there are fewer tokens.
    """
    tail = list(tokens[-_LOOP_TOKENS:])
    if len(tail) < _LOOP_TOKENS:
        return False
    return any(tail[p:] == tail[:-p] for p in range(1, _LONGEST_PERIOD + 1))
