"""Bounds the duration of steps on a CPU, so that streams do not stall.

A step cannot be interrupted: until it ends, no stream gets a token. On a CPU, prompts and long
contexts are so expensive that a step with a fixed token budget may take seconds. The costs are
learned from the steps themselves, so they follow the model, the machine and its other load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .policy import RowInFlight
from .request import Request

LIMIT_SECONDS = 0.2  # limit of a step in which some request decodes
PROMPT_SECONDS = 1.0  # limit of a step without decodes, which delays aborts and new requests
# Scale factors that make one unit of each kind of work cost about as much as one token.
_FIXED, _KEYS, _PAIRS = 10.0, 1 / 400, 1 / 1000
_GUESS = 0.002  # seconds per unit, until the first step has ended
_RATE = 0.3  # learning rate: the fraction of the log of a prediction's error that is corrected
_OUTLIER = 0.7  # clip for that logarithm: a larger error means that something else used the machine
_LONG = 0.125  # a context is long if reading it costs more than this fraction of LIMIT_SECONDS
# Indices into `Work`. Decodes and prompts have separate costs, because a product with a large
# matrix costs less per row.
_FIXED_AT, _ROWS_AT, _KEYS_AT = range(3)  # per step; decodes: tokens, keys read
# prompts: tokens, keys, pairs, logprobs
_TOKENS_AT, _READS_AT, _PAIRS_AT, _LOGPROBS_AT = range(3, 7)
Work = Sequence[float]  # [7]


def decode_work(num_tokens: int, context: int) -> Work:
    """The work of a decode or verify row of `num_tokens` that attends to `context` earlier
    tokens."""
    return 0.0, num_tokens, _KEYS * context, 0.0, 0.0, 0.0, 0.0


def prompt_work(num_tokens: float, context: float, num_logprobs: float = 0.0) -> Work:
    """The work of `num_tokens` of a prompt that attend to `context` earlier tokens."""
    pairs = num_tokens * (context + num_tokens / 2)
    return 0.0, 0.0, 0.0, num_tokens, _KEYS * context, _PAIRS * pairs, num_logprobs


@dataclass(slots=True)
class StepBudget:
    """The remaining budget of a step: tokens, and with `times` also seconds for prompts."""

    tokens: int
    times: StepTimes | None = None  # None: the step's duration is not bounded
    seconds: float = 0.0
    resting: frozenset[str] = frozenset()  # ids of requests that skip this step
    has_prompt: bool = False

    @property
    def is_spent(self) -> bool:
        """True if no further prompt fits."""
        if self.tokens <= 0:
            return True
        return self.has_prompt and self.seconds < LIMIT_SECONDS / 10

    def limit(self, request: Request, available: int) -> int:
        """How many of the `available` (> 0) tokens the request may have. Deducts their time.

        The first prompt of a step always gets at least one token, so that it makes progress.
        """
        if self.times is None:
            return available
        if not request.is_prefilling:
            return 0 if request.request_id in self.resting else available
        if self.is_spent:
            return 0
        most = min(available, request.prefill_len - request.num_prefilled)
        context, logprobs = request.num_prefilled, float(request.wants_prompt_logprobs)
        read = self.times.seconds(prompt_work(0, context))
        each = self.times.seconds(prompt_work(1, context + most / 2, logprobs)) - read
        # Reading the context may use at most half of a prompt's time.
        count = max(1, min(most, int(max(self.seconds - read, read) / each)))
        self.seconds -= read + count * each
        self.has_prompt = True
        return count


class StepTimes:
    """Learns seconds per unit of work. One instance belongs to one scheduler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = [_GUESS] * 7  # per unit of `Work`
        self._is_guess = True
        self._begun: dict[int, tuple[float, Work]] = {}  # step id -> launch time, its work
        self._ended_at = -math.inf

    def seconds(self, work: Work) -> float:
        """The predicted duration of `work`."""
        return sum([each * units for each, units in zip(self._seconds, work, strict=True)])

    def budget(
        self, tokens: int, running: Iterable[Request], num_drafts: int, has_waiting: bool
    ) -> StepBudget:
        """The budget that the decodes of the next step leave for prompts.

        Prompts may lengthen the step to LIMIT_SECONDS or to 1.5 times the decodes' time, whichever
        is longer.
        """
        decodes, has_prompts = [], has_waiting
        for request in running:
            if request.is_prefilling:
                has_prompts = True
            else:
                work = decode_work(num_drafts + 1, len(request.token_ids))
                decodes.append((request, self.seconds(work)))
        if not decodes:
            return StepBudget(tokens, self, PROMPT_SECONDS)
        taken = _FIXED * self._seconds[_FIXED_AT] + sum([seconds for _, seconds in decodes])
        limit = LIMIT_SECONDS / 2 if has_prompts else LIMIT_SECONDS
        resting: list[str] = []
        if taken > limit:
            taken = self._rest(decodes, taken, limit, resting)
        seconds = max(LIMIT_SECONDS - taken, taken / 2)
        return StepBudget(tokens, self, seconds, frozenset(resting))

    def _rest(
        self, decodes: list[tuple[Request, float]], taken: float, limit: float, resting: list[str]
    ) -> float:
        """Let requests with long contexts take turns, so that short ones run in every step.

        If all contexts are long, nobody rests: turns would not help any short request and would
        only add steps. Appends the ids of resting requests to `resting` and returns the predicted
        seconds of those that run.
        """
        bound = _LONG * LIMIT_SECONDS / (_KEYS * self._seconds[_KEYS_AT])
        long = [entry for entry in decodes if len(entry[0].token_ids) > bound]
        if len(long) == len(decodes):
            return taken
        taken -= sum([seconds for _, seconds in long])
        long.sort(key=lambda entry: -entry[0].num_rests)
        for index, (request, seconds) in enumerate(long):
            if not index or taken + seconds <= limit:
                taken += seconds
                request.num_rests = 0
            else:
                resting.append(request.request_id)
                request.num_rests += 1
        return taken

    def begin(self, step_id: int, entries: Iterable[RowInFlight]) -> None:
        """Note the launch of a step, which runs once the previous one has ended."""
        total = [_FIXED, *[0.0] * 6]
        for request, _, row in entries:
            count, context = row.num_tokens, row.num_computed_tokens
            if context >= request.prefill_len:
                work = decode_work(count, context)
            else:
                work = prompt_work(count, context, count * request.wants_prompt_logprobs)
            total = [units + more for units, more in zip(total, work, strict=True)]
        self._begun[step_id] = self._clock(), total

    def end(self, step_id: int) -> None:
        """Note that a step's results have arrived, and learn from its duration."""
        now, (begun_at, work) = self._clock(), self._begun.pop(step_id)
        seconds = now - max(begun_at, self._ended_at)
        self._ended_at = now
        if seconds > 0:
            self._learn(work, seconds)

    def _learn(self, work: Work, seconds: float) -> None:
        """Correct the costs of prompts if the step had any, otherwise those of decodes.

        A prompt's time is the step's time minus the prediction for its decodes. Each cost is
        corrected in proportion to its part of the predicted time, since a step says little about
        the cost of work that it hardly contained.
        """
        parts = [each * units for each, units in zip(self._seconds, work, strict=True)]
        if self._is_guess:
            self._is_guess = False
            self._seconds = [each * seconds / sum(parts) for each in self._seconds]
            return
        others = 0.0
        if work[_TOKENS_AT]:
            others = sum(parts[:_TOKENS_AT])
            parts[:_TOKENS_AT] = [0.0] * _TOKENS_AT
        predicted = sum(parts)
        ratio = max(seconds - others, 0.01 * predicted) / predicted
        wrong = min(max(math.log(ratio), -_OUTLIER), _OUTLIER)
        step = _RATE * wrong * predicted / sum([part * part for part in parts])
        self._seconds = [
            each * math.exp(step * part) for each, part in zip(self._seconds, parts, strict=True)
        ]
