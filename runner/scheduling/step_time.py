"""Bounds the duration of steps, so that streams do not stall: on a CPU, and with `--max-itl-ms`.

A step cannot be interrupted: until it ends, no stream gets a token. On a CPU, prompts and long
contexts are so expensive that a step with a fixed token budget may take seconds. The costs are
learned from the steps themselves, so they follow the model, the machine and its other load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .policy import RequestQueue, RowInFlight
from .request import Request

LIMIT_SECONDS = 0.2  # limit of a step in which some request decodes, unless the user sets one
LEAST_TOKENS = 16  # a prompt advances by this many in each step, whatever limit the user sets
PROMPT_SECONDS = 1.0  # on a CPU, limit of a step without decodes: it delays aborts, new requests
# Scale factors that make one unit of each kind of work cost about as much as one token.
_FIXED, _KEYS, _PAIRS = 10.0, 1 / 400, 1 / 1000
_GUESS = 0.002  # seconds per unit, until the first step has ended
_RATE = 0.3  # learning rate: the fraction of the log of a prediction's error that is corrected
_OUTLIER = 0.7  # clip for that logarithm: a larger error means that something else used the machine
_LONG = 0.125  # a context is long if reading it costs more than this fraction of the limit
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
        if self.times is None:
            return False
        return self.has_prompt and self.seconds < self.times.limit / 10

    def of_prompt(self, num_left: int, context: int, has_logprobs: bool, available: int) -> int:
        """How many of the `available` tokens a prompt may have that has `num_left` tokens left
        after `context` others. Deducts their time.

        The first prompt of a step always gets some tokens, so that it makes progress.
        """
        most = min(available, num_left)
        if self.times is None or most <= 0:
            return most
        if self.is_spent:
            return 0
        count, seconds = self.times.fit(
            most, context, has_logprobs, self.seconds, not self.has_prompt
        )
        if count:
            self.seconds -= seconds
            self.has_prompt = True
        return count

    def halve(self, tokens: int) -> StepBudget:
        """Move half of the seconds into a budget of `tokens` tokens, in which no prompt is the
        first of the step."""
        self.seconds /= 2
        return StepBudget(tokens, self.times, self.seconds, has_prompt=True)


class StepTimes:
    """Learns seconds per unit of work. One instance belongs to one scheduler."""

    def __init__(
        self,
        max_itl_ms: float | None = None,
        is_cpu: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_itl_ms`: the user's limit of a step in which some request decodes. Prompts respect
        it even if the decodes alone take as long; without it they may add half of that time.

        Unless `is_cpu`, all requests run in every step, and a step without decodes has no limit.
        """
        self.limit = LIMIT_SECONDS if max_itl_ms is None else max_itl_ms / 1000
        self._is_strict = max_itl_ms is not None
        self._is_cpu = is_cpu
        self._clock = clock
        self._seconds = [_GUESS] * 7  # per unit of `Work`
        self._is_guess = True
        self._begun: dict[int, tuple[float, Work]] = {}  # step id -> launch time, its work
        self._ended_at = -math.inf

    def seconds(self, work: Work) -> float:
        return sum([each * units for each, units in zip(self._seconds, work, strict=True)])

    def fit(
        self, most: int, context: int, has_logprobs: bool, seconds: float, is_first: bool
    ) -> tuple[int, float]:
        """How many of `most` tokens of a prompt fit into `seconds`, and the seconds that they need.

        `is_first`: it is the first prompt of its step, which must make progress.
        """
        read = self.seconds(prompt_work(0, context))
        if not self._is_strict:  # reading the context may use at most half of a prompt's time
            each = self.seconds(prompt_work(1, context + most / 2, float(has_logprobs))) - read
            count = min(max(int(max(seconds - read, read) / each), 1), most)
            return count, read + count * each
        pair = self._seconds[_PAIRS_AT] * _PAIRS
        each = self._seconds[_TOKENS_AT] + self._seconds[_LOGPROBS_AT] * has_logprobs
        each += pair * context
        # n tokens need read + each n + pair n^2 / 2 seconds. This form of the root divides by no 0.
        rest, count = max(0.0, seconds - read), most
        if rest < most * (each + pair * most / 2):
            count = int(2 * rest / (each + math.sqrt(each * each + 2 * pair * rest)))
        count = min(max(count, LEAST_TOKENS if is_first else 0), most)
        return count, read + count * (each + pair * count / 2)

    def budget(
        self, tokens: int, running: RequestQueue, num_drafts: int, has_waiting: bool
    ) -> StepBudget:
        """The budget that the decodes of the next step leave for prompts.

        Prompts may lengthen the step to the limit. Unless it is the user's, they may also lengthen
        it to 1.5 times the decodes' time.
        """
        decodes = [request for request in running if not request.is_prefilling]
        if not decodes:
            return StepBudget(tokens, self, PROMPT_SECONDS if self._is_cpu else math.inf)
        contexts = [len(request.token_ids) for request in decodes]
        work = decode_work(len(decodes) * (num_drafts + 1), sum(contexts))
        taken = _FIXED * self._seconds[_FIXED_AT] + self.seconds(work)
        resting: list[str] = []
        if self._is_cpu:
            has_prompts = has_waiting or len(decodes) < len(running)
            limit = self.limit / 2 if has_prompts else self.limit
            if taken > limit:
                each = [self.seconds(decode_work(num_drafts + 1, context)) for context in contexts]
                taken = self._rest(list(zip(decodes, each, strict=True)), taken, limit, resting)
        seconds = max(self.limit - taken, 0.0 if self._is_strict else taken / 2)
        return StepBudget(tokens, self, seconds, frozenset(resting))

    def _rest(
        self, decodes: list[tuple[Request, float]], taken: float, limit: float, resting: list[str]
    ) -> float:
        """Let requests with long contexts take turns, so that short ones run in every step.

        If all contexts are long, nobody rests: turns would not help any short request and would
        only add steps. Appends the ids of resting requests to `resting` and returns the predicted
        seconds of those that run.
        """
        bound = _LONG * self.limit / (_KEYS * self._seconds[_KEYS_AT])
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
        num_rows = num_keys = 0  # of decodes
        total = [_FIXED, *[0.0] * 6]
        for request, _, row in entries:
            count, context = row.num_tokens, row.num_computed_tokens
            if context >= request.prefill_len:
                num_rows += count
                num_keys += context
            else:
                work = prompt_work(count, context, count * request.wants_prompt_logprobs)
                total = [units + more for units, more in zip(total, work, strict=True)]
        total[_ROWS_AT], total[_KEYS_AT] = num_rows, _KEYS * num_keys
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
