"""Runs whole steps of made-up requests before the first real one, so that none pays for set-up.

What is launched for the first time loads code, and what was never launched is compiled. Their KV
goes to blocks that nobody owns yet; afterwards their rows are free again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..configs.schema import Config
from .messages import SamplingParams
from .plan import NewRequest, ScheduledRow, StepPlan

_PROMPT_LEN = 5
_KINDS = (
    SamplingParams(temperature=0.0, seed=0, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, has_own_seed=True, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, top_k=5, max_tokens=8),
    SamplingParams(temperature=1.0, seed=0, top_p=0.9, max_tokens=8),
)
# What takes memory for good at its first use is left to requests.
_RARE = (SamplingParams(temperature=0.0, seed=0, presence_penalty=0.1, max_tokens=8),)


class SteppedRunner(Protocol):
    """What is used of a model runner."""

    @property
    def facts(self) -> Any: ...

    def execute(self, plan: StepPlan) -> Any: ...

    def fill_drafts(self, num_slots: int, num_drafts: int) -> None: ...


def warm_up_steps(runner: SteppedRunner, config: Config, with_rare: bool = False) -> None:
    """A prefill, a decode and, with a drafter, a step that verifies, for every kind of sampling."""
    steps = _Steps(runner)
    if not steps.fit():
        return
    for params in (*_KINDS, *_RARE) if with_rare else _KINDS:
        steps.serve([params])
    if config.scheduler.max_num_seqs > 1:
        steps.serve([_KINDS[0], _KINDS[2]])  # a batch whose rows are sampled differently
        steps.serve([_KINDS[1], _KINDS[2]])


class _Steps:
    def __init__(self, runner: SteppedRunner) -> None:
        self._runner = runner
        self._num_drafts: int = runner.facts.needs.num_speculative_tokens
        self._step_id = -(1 << 40)  # no step of a scheduler has a negative id

    def _length(self) -> int:
        lookahead: int = self._runner.facts.needs.num_lookahead_tokens
        return _PROMPT_LEN + 3 * (self._num_drafts + 1) + lookahead

    def fit(self) -> bool:
        """Whether such requests fit into the context and the KV cache."""
        facts, length = self._runner.facts, self._length()
        blocks = all(group.num_blocks > -(-length // group.block_size) for group in facts.kv_groups)
        return length < facts.max_model_len and blocks

    def serve(self, kinds: list[SamplingParams]) -> None:
        """One request for each of `kinds`, all in one batch, through their first three steps."""
        runner, drafts = self._runner, self._num_drafts
        slots = range(len(kinds))
        self._run(list(self._prefills(len(kinds))), self._new_requests(kinds))
        bound = _PROMPT_LEN
        self._run([ScheduledRow(slot, 1, 0, bound, False, 1) for slot in slots])
        if drafts:
            runner.fill_drafts(len(kinds), drafts)
            bound += 1
            rows = [ScheduledRow(slot, drafts + 1, drafts, bound, False, 2) for slot in slots]
            self._run(rows)
        self._step_id -= 1
        runner.execute(StepPlan(self._step_id, freed_slots=list(slots))).get()

    def _prefills(self, count: int) -> Iterator[ScheduledRow]:
        for slot in range(count):
            yield ScheduledRow(slot, _PROMPT_LEN, 0, 0, False, 0)

    def _new_requests(self, kinds: list[SamplingParams]) -> list[NewRequest]:
        """All use the same blocks: what they compute is of no interest."""
        length = self._length()
        blocks = [
            list(range(1, 1 - (-length // group.block_size)))
            for group in self._runner.facts.kv_groups
        ]
        return [
            NewRequest(slot, [0] * _PROMPT_LEN, _PROMPT_LEN, 0, blocks, params)
            for slot, params in enumerate(kinds)
        ]

    def _run(self, rows: list[ScheduledRow], new_requests: list[NewRequest] | None = None) -> None:
        self._step_id -= 1
        plan = StepPlan(self._step_id, new_requests=new_requests or [], rows=rows)
        self._runner.execute(plan).get()
