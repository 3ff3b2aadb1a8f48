"""Runs whole steps of dummy requests before the first real one, so that no request waits for
set-up.

The first launch of a kernel compiles it or loads its code. The dummy requests write their KV to
blocks that no request owns yet; afterwards their slots are free again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from ...configs.schema import StepLimits
from ...kernels.linear.linear_choice import BUCKETS
from ..messages import SamplingParams
from ..scheduling.plan import NewRequest, ScheduledRow, StepPlan

_PROMPT_LEN = 5
_KINDS = (
    SamplingParams(temperature=0.0, seed=0, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, has_own_seed=True, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, top_k=5, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, top_p=0.9, max_tokens=8),
    # Greedy, but its logits are written; outside graphs no other kind here has unchanged logits.
    SamplingParams(temperature=0.0, seed=0, logprobs=0, max_tokens=8),
)
# Outside graphs, these select the tokens of many rows by different kernels: without noise, with
# noise, and from written logits.
_WIDE = (_KINDS[0], _KINDS[2], _KINDS[4])
# These allocate permanent memory at their first use, which is left to requests.
_RARE = (SamplingParams(temperature=0.0, seed=0, presence_penalty=0.1, max_tokens=8),)


def different_tokens(count: int, vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary, all different if there are as many."""
    stride = round(vocab_size * 0.618)
    while math.gcd(stride, vocab_size) > 1:
        stride += 1
    return [index * stride % vocab_size for index in range(1, count + 1)]


class SteppedRunner(Protocol):
    """The part of a model runner that is used here."""

    @property
    def facts(self) -> Any: ...

    def execute(self, plan: StepPlan) -> Any: ...

    def fill_tokens(self, num_slots: int, num_drafts: int) -> None: ...


def warm_up_steps(runner: SteppedRunner, own: StepLimits | None = None) -> None:
    """Run a prefill, a decode and, with a drafter, a verification for every kind of sampling; then
    the larger batches that use other kernels, and those that they would be with the limits `own`.
    """
    steps = _Steps(runner)
    if not steps.fit():
        return
    for params in _KINDS:
        steps.serve([params])
    if min(steps.limits.max_num_seqs, steps.limits.max_num_batched_tokens) > 1:
        steps.serve([_KINDS[0], _KINDS[2]])  # rows that are sampled differently
        steps.serve([_KINDS[1], _KINDS[2]])
    wide = {*wide_batches(steps.limits, steps.num_drafts)}
    if own is not None:
        wide |= {*wide_batches(own, steps.num_drafts)}
    for num_reqs in sorted(wide):
        for params in _WIDE:
            steps.serve_wide([params] * num_reqs)


def rare_steps(runner: SteppedRunner) -> None:
    """Run the steps that `warm_up_steps` leaves to requests; only a dry start does so.

    They include prompts and batches of all sizes: without a graph, a step's kernels depend on its
    number of rows, and a drafter's also on the number of requests and on how many tokens of each
    it has missed.
    """
    steps = _Steps(runner)
    if not steps.fit():
        return
    for params in _RARE:
        steps.serve([params])
    most = min(steps.limits.max_num_batched_tokens, runner.facts.max_model_len - 1)
    for size in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        steps.serve_prompt(size)
    budget = steps.limits.max_num_batched_tokens // (_PROMPT_LEN + steps.num_drafts)
    for power in range(1, min(steps.limits.max_num_seqs, budget).bit_length()):
        steps.serve([_KINDS[0]] * (1 << power))
    if most_missed := runner.facts.needs.max_deferred_tokens:
        seats = min(steps.limits.max_num_seqs, steps.limits.max_num_batched_tokens)
        for power in range(seats.bit_length()):
            steps.catch_up(1 << power, most_missed)


def wide_batches(limits: StepLimits, num_drafts: int) -> list[int]:
    """Numbers of requests, ascending, for which `serve_wide` uses every bucket of logits rows that
    a step can have.

    With n requests it has n logits rows, and then (n - 1) (K + 1) + 1 if there are drafts.
    """
    width, found, below = num_drafts + 1, set(), 1
    most = min(limits.max_num_seqs, (limits.max_num_batched_tokens - 1) // width)
    for bucket in (*BUCKETS[1:], 2 * BUCKETS[-1]):
        if most > below:
            found.add(min(bucket, most))
        elif most > 1 and num_drafts and (most - 1) * width + 1 > below:
            found.add(min((bucket - 1) // width + 1, most))
        below = bucket
    return sorted(found)


def request_fits(facts: Any, num_tokens: int) -> bool:
    """Whether a runner can hold a request of `num_tokens`, all other requests left aside.

    The context must have room for one more token, and each KV group must have enough blocks
    without block 0, which no request owns.
    """
    blocks = [group.num_blocks > -(-num_tokens // group.block_size) for group in facts.kv_groups]
    return num_tokens < facts.max_model_len and all(blocks)


class _Steps:
    def __init__(self, runner: SteppedRunner) -> None:
        self._runner = runner
        self.num_drafts: int = runner.facts.needs.num_speculative_tokens
        self.limits: StepLimits = runner.facts.limits
        self._step_id = -(1 << 40)  # negative, unlike the ids of the scheduler's steps

    def _length(self) -> int:
        lookahead: int = self._runner.facts.needs.num_lookahead_tokens
        return _PROMPT_LEN + 3 * (self.num_drafts + 1) + lookahead

    def fit(self) -> bool:
        """Whether the dummy requests fit into the context and the KV cache."""
        return request_fits(self._runner.facts, self._length())

    def serve(self, kinds: list[SamplingParams]) -> None:
        """Run one request for each of `kinds`, all in one batch, for three steps."""
        drafts, slots = self.num_drafts, range(len(kinds))
        bound = min(_PROMPT_LEN, self.limits.max_num_batched_tokens // len(kinds))
        new = [self._new_request(slot, bound, params) for slot, params in enumerate(kinds)]
        self._run([_prefill(request) for request in new], new)
        self._run([ScheduledRow(slot, 1, 0, bound, False, 1) for slot in slots])
        if drafts:
            self._run(self._verifying(slots, bound + 1))
        self._run([], freed_slots=list(slots))

    def serve_prompt(self, prompt_len: int) -> None:
        """Run the prefill of one request if the KV cache has the blocks for it."""
        if request_fits(self._runner.facts, prompt_len):
            new = self._new_request(0, prompt_len, _KINDS[0])
            self._run([_prefill(new)], [new])
            self._run([], freed_slots=[0])

    def catch_up(self, num_reqs: int, most: int) -> None:
        """Run decodes of requests whose drafter has missed up to `most` tokens of each.

        Powers of two cover every tile of its attention over the missed tokens.
        """
        slots = range(num_reqs)
        new = [self._new_request(slot, 1, _KINDS[0]) for slot in slots]
        self._run([_prefill(request) for request in new], new)
        for missed in [1 << power for power in range(most.bit_length())]:
            self._run([ScheduledRow(slot, 1, 0, missed, False, missed, missed) for slot in slots])
        self._run([], freed_slots=list(slots))

    def serve_wide(self, kinds: list[SamplingParams]) -> None:
        """Run steps of many rows that are not uniform, so that no graph selects their tokens.

        They have as few tokens as possible: prefills and, with a drafter, rows that verify beside
        one prefill.
        """
        last = len(kinds) - 1
        new = [self._new_request(slot, 1, params) for slot, params in enumerate(kinds[:last])]
        new.append(self._new_request(last, 2, kinds[last]))
        self._run([_prefill(request) for request in new], new)
        if self.num_drafts:
            again = self._new_request(last, self.num_drafts + 2, kinds[last])
            rows = self._verifying(range(last), 1)
            self._run([*rows, _prefill(again)], [again], freed_slots=[last])
        self._run([], freed_slots=list(range(len(kinds))))

    def _verifying(self, slots: range, bound: int) -> list[ScheduledRow]:
        """Rows that verify K drafts each, after at most `bound` tokens."""
        drafts = self.num_drafts
        self._runner.fill_tokens(len(slots), drafts)
        return [ScheduledRow(slot, drafts + 1, drafts, bound, False, 1) for slot in slots]

    def _new_request(self, slot: int, prompt_len: int, params: SamplingParams) -> NewRequest:
        """A request with blocks of its own if there are enough.

        If two requests wrote to one block, the result would be random, and graphs could not be
        compared with eager runs.
        """
        length, blocks = max(self._length(), prompt_len), []
        for group in self._runner.facts.kv_groups:
            count = -(-length // group.block_size)
            first = 1 + slot * count
            if first + count > group.num_blocks:
                first = 1
            blocks.append(list(range(first, first + count)))
        return NewRequest(slot, [0] * prompt_len, prompt_len, 0, blocks, params)

    def _run(
        self,
        rows: list[ScheduledRow],
        new_requests: Sequence[NewRequest] = (),
        freed_slots: Sequence[int] = (),
    ) -> None:
        self._step_id -= 1
        plan = StepPlan(self._step_id, list(freed_slots), list(new_requests), rows=rows)
        self._runner.execute(plan).get()


def _prefill(request: NewRequest) -> ScheduledRow:
    return ScheduledRow(request.slot, request.prompt_len, 0, 0, False, 0)
