"""Shares a step's tokens among prompts, so that short prompts do not wait for long ones.

Prompts are computed in order of priority and arrival. If the first one that is not finished needs
more than the step has left, at most half of that goes to prompts of its priority that arrived later
and are shorter, the shortest first. The rest of the step is spent in order of arrival.

The bound that follows: prompts in order of arrival get at least half of every step's prompt tokens,
so each is finished in at most twice the steps that it would need if none overtook it. Prompts of
similar length never overtake one another, since taking turns would make all of them late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .kv_blocks import KVBlocks, RequestBlocks
from .request import Request
from .step_time import StepBudget

Shares = dict[Request, int]  # requests that overtake a prompt, and the tokens of each

_SHORTER = 2  # a prompt overtakes one only if that has at least this many times its tokens left


class Room:
    """What new requests may take without delaying those that they overtake."""

    def __init__(self, kv: KVBlocks, num_slots: int, num_lookahead_tokens: int) -> None:
        self._kv = kv
        self._slots = num_slots
        self._lookahead = num_lookahead_tokens
        self._free = kv.num_free_blocks()

    def take(self, request: Request) -> bool:
        """Set blocks for all known tokens of a request aside, and a slot if it has none; False,
        setting nothing aside, if there are too few."""
        blocks: RequestBlocks | None = request.blocks
        needed = self._kv.missing_blocks(len(request.token_ids) + self._lookahead, blocks)
        slots = self._slots - (blocks is None)
        free = [have - need for have, need in zip(self._free, needed, strict=True)]
        if slots < 0 or min(free) < 0:
            return False
        self._slots, self._free = slots, free
        return True


class PromptTurns:
    """The tokens of one step that prompts may use, from its first running prompt on."""

    def __init__(self, budget: StepBudget, behind: Sequence[Request], width: int) -> None:
        """`behind`: the running requests after that prompt, in order.

        A long chunk leaves each of them that decodes `width` tokens, for its drafts, too.
        """
        self._budget = budget
        self._behind = behind
        num_decodes = sum([request.num_prefilled >= request.prefill_len for request in behind])
        self._width = width
        self._kept = min(num_decodes * width, budget.tokens - 1)
        self._set_aside = 0
        self.overtaking: Shares = {}  # without those that have taken their tokens

    def take(self, request: Request) -> int:
        """How many tokens of its prompt a running request may compute in this step."""
        tokens = self.overtaking.pop(request, None)
        if tokens is None:
            free = self._budget.tokens - self._kept - self._set_aside
            return of_prompt(self._budget, request, free) if free > 0 else 0
        self._set_aside -= tokens
        return tokens

    def pass_decode(self) -> None:
        """One of the requests that decode behind the first prompt has got its tokens."""
        self._kept = max(0, self._kept - self._width)

    def share(self, head: Request, waiting: Iterable[Request], room: Room) -> None:
        """Let prompts overtake the first one, `head`, if it does not end with this step.

        `waiting`: the requests without a slot, in order. One of a better priority comes before
        all. A request is admitted only if those that it overtakes still find blocks and a slot.
        """
        budget, free = self._budget, self._budget.tokens - self._kept
        left = head.prefill_len - head.num_prefilled
        if free <= 0 or of_prompt(replace(budget), head, free) == left:
            return
        prompts = [request for request in self._behind if request.is_prefilling]
        shorter = [request for request in prompts if _is_shorter(request, head, left)]
        first: list[Request] = []
        if not all([room.take(request) for request in (head, *prompts)]):
            waiting = ()
        for request in waiting:
            if request.is_blocked:
                continue
            if request.priority > head.priority or not room.take(request):
                break
            if request.order < head.order:
                first.append(request)
            elif _is_shorter(request, head, left):
                shorter.append(request)
        for request in first:
            self._give(request, budget, free)
            free -= self.overtaking[request]
        if shorter and free > 1:
            part = budget.halve(free // 2)
            shorter.sort(key=lambda request: (_num_left(request).bit_length(), request.arrival))
            for request in shorter:
                self._give(request, part, part.tokens)
                part.tokens -= self.overtaking[request]
            budget.seconds += part.seconds
        self._set_aside = sum(self.overtaking.values())

    def _give(self, request: Request, budget: StepBudget, available: int) -> None:
        self.overtaking[request] = of_prompt(budget, request, available) if available > 0 else 0


def of_prompt(budget: StepBudget, request: Request, available: int) -> int:
    """How many of the `available` (> 0) tokens a request may have for its prompt; their time is
    deducted from the budget."""
    context, has_logprobs = request.num_prefilled, request.wants_prompt_logprobs
    return budget.of_prompt(_num_left(request), context, has_logprobs, available)


def _num_left(request: Request) -> int:
    """Tokens of the prompt that no step has; all that are known if the request has no slot."""
    if request.blocks is None:
        return len(request.token_ids)
    return request.prefill_len - request.num_prefilled


def _is_shorter(request: Request, head: Request, left: int) -> bool:
    return request.priority == head.priority and _SHORTER * _num_left(request) <= left
