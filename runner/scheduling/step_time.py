"""Owns how many seconds a step takes on a CPU, and what fits into one without stopping streams.

A step cannot be interrupted: until it ends, no stream gets a token. On a CPU a prompt's tokens and
long contexts cost so much that a step of fixed size may take seconds. The costs are learned from
the steps themselves, so they follow the model, the machine and whatever else runs on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .policy import RowInFlight
from .request import Request

LIMIT_SECONDS = 0.2  # a step that some request decodes in
PROMPT_SECONDS = 1.0  # a step that nobody decodes in: an abort or a new request waits for its end
# Each unit of work is chosen to cost about as much as one token does.
_FIXED, _KEYS, _PAIRS = 10.0, 1 / 400, 1 / 1000
_GUESS = 0.002  # seconds per unit, until the first step has ended
_RATE = 0.3  # the share of a wrong prediction's logarithm that is corrected at once
_OUTLIER = 0.7  # a logarithm beyond this counts as this: something else held the machine
_LONG = 0.125  # a context is long if reading it takes this share of LIMIT_SECONDS
# Units by what they are spent on. Decodes and prompts have costs of their own, since a matrix of
# many rows is quicker by row than one of a few.
_FIXED_AT, _ROWS_AT, _KEYS_AT = range(3)  # of the step, of decodes: tokens, keys read
_TOKENS_AT, _READS_AT, _PAIRS_AT, _LOGPROBS_AT = range(3, 7)  # of prompts
Work = Sequence[float]  # [7]


def decode_work(num_tokens: int, context: int) -> Work:
    """The work of a row that decodes or verifies `num_tokens` after `context` others."""
    return 0.0, num_tokens, _KEYS * context, 0.0, 0.0, 0.0, 0.0


def prompt_work(num_tokens: float, context: float, num_logprobs: float = 0.0) -> Work:
    """The work of `num_tokens` of a prompt that attend to `context` others."""
    pairs = num_tokens * (context + num_tokens / 2)
    return 0.0, 0.0, 0.0, num_tokens, _KEYS * context, _PAIRS * pairs, num_logprobs


@dataclass(slots=True)
class StepBudget:
    """What one step has left: tokens, and seconds for prompts where `times` bounds them."""

    tokens: int
    times: StepTimes | None = None  # None: the step is not bounded by time
    seconds: float = 0.0
    resting: frozenset[str] = frozenset()  # ids of requests that this step leaves out
    has_prompt: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether no further prompt fits."""
        if self.tokens <= 0:
            return True
        return self.has_prompt and self.seconds < LIMIT_SECONDS / 10

    def limit(self, request: Request, available: int) -> int:
        """How many of the `available` (> 0) tokens the request may have; takes their time off.

        The first prompt always gets a token, so that it proceeds.
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
        # Reading the context must not take more than half of a prompt's time.
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
        self._begun: dict[int, tuple[float, Work]] = {}  # step id -> when it was launched, its work
        self._ended_at = -math.inf

    def seconds(self, work: Work) -> float:
        """How long this much work takes."""
        return sum([each * units for each, units in zip(self._seconds, work, strict=True)])

    def budget(
        self, tokens: int, running: Iterable[Request], num_drafts: int, has_waiting: bool
    ) -> StepBudget:
        """What fits into the next step of these requests, beside those that decode.

        Prompts lengthen it to LIMIT_SECONDS, or by half of the decodes' time where that is more.
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

        Without short ones nobody rests: the step is as long as these requests make it, and turns
        would only add steps. Returns the seconds of those that run.
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
        """A step is launched; it runs once the one before has ended."""
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
        """Its results are there."""
        now, (begun_at, work) = self._clock(), self._begun.pop(step_id)
        seconds = now - max(begun_at, self._ended_at)
        self._ended_at = now
        if seconds > 0:
            self._learn(work, seconds)

    def _learn(self, work: Work, seconds: float) -> None:
        """Correct the costs of prompts if the step has some, else those of decodes.

        A prompt took what the step took longer than its decodes alone. Each cost moves by its part
        of the predicted time, since what hardly counted tells hardly anything.
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
