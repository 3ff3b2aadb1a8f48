"""A model runner without tensors, which follows plans exactly and checks everything in them.

The "model" is a hash of the tokens so far; "KV" holds token ids, and each attention checks that the
blocks it reads hold exactly the request's tokens. Rejected drafts, lookahead slots and stale rows
leave garbage behind, so a block that is shared, reused or rolled back wrongly is noticed.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.configs.schema import StepLimits
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.plan import RowResult, ScheduledRow, StepPlan

GARBAGE = -7


def next_token(context: Sequence[int], vocab_size: int, line: np.ndarray | None = None) -> int:
    """The model's choice; the next allowed id if a mask line forbids it."""
    token = zlib.crc32(array("q", context).tobytes()) % vocab_size
    while line is not None and not (int(line[token // 32]) >> (token % 32)) & 1:
        token = (token + 1) % vocab_size
    return token


@dataclass
class Slot:
    """A request's row on the device."""

    tokens: list[int]
    prefill_len: int
    prompt_len: int
    num_computed: int
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)
    wants_prompt_logprobs: bool = False


@dataclass
class FakeHandle:
    """Results of a step that may not have run yet."""

    run_queue: Callable[[], None]
    results: list[RowResult] | None = None
    is_slow: Callable[[], bool] = lambda: False

    def wait(self, timeout: float) -> bool:
        return not self.is_slow()

    def get(self) -> list[RowResult]:
        while self.results is None:
            self.run_queue()
        return self.results


class FakeRunner:
    """Steps run in launch order: at once, or (lazy) not before somebody needs their results."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        vocab_size: int = 40,
        draft_accuracy: float = 0.7,
        lazy: bool = True,
        trim: bool = True,
        device: str = "cpu",
        kv_needs_next_token: bool = False,
        seed: int = 0,
    ) -> None:
        groups = [replace(group, needs_next_token=kv_needs_next_token) for group in groups]
        self.facts = SimpleNamespace(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            kv_groups=tuple(groups),
            eos_token_ids=(0,),
            device=device,
            dtype="none",
            attention_backend="fake",
            needs=SimpleNamespace(
                num_speculative_tokens=num_speculative_tokens,
                num_lookahead_tokens=num_lookahead_tokens,
                kv_needs_next_token=kv_needs_next_token,
                max_deferred_tokens=0,
                per_request_drafts=False,
                watched=False,
            ),
            limits=StepLimits(max_num_seqs, max_num_batched_tokens),
            startup_seconds={},
            lowered_claims=(),
            state_group=None,
            step_seconds={},
        )
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.speculator = None
        self.nan_slots: set[int] = set()
        self.plans: list[StepPlan] = []
        self.was_shut_down = False
        self.is_slow = False  # if True, results take longer than any time-out
        self._accuracy, self._lazy, self._trim = draft_accuracy, lazy, trim
        self._random = random.Random(seed)
        self._slots: dict[int, Slot] = {}
        self._kv = [[[GARBAGE] * g.block_size for _ in range(g.num_blocks)] for g in groups]
        # What a drafter would write: at each position the next token.
        self._draft_kv = [[list(block) for block in kv] for kv in self._kv]
        self._queue: deque[Callable[[], None]] = deque()
        self._drafts: dict[int, list[list[int]]] = {}  # step id -> layout of its drafts

    # --- the engine's interface ---

    def execute(self, plan: StepPlan) -> FakeHandle:
        self.forward(plan)
        return self.sample(plan, None)

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._launch(lambda: self._forward(plan))

    def take_draft_token_ids(self, plan: StepPlan) -> list[list[int]]:
        assert plan.needs_draft_ids
        while plan.step_id not in self._drafts:
            self._run_next()
        return [list(ids) for ids in self._drafts[plan.step_id]]

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None) -> FakeHandle:
        handle = FakeHandle(self._run_next, is_slow=lambda: self.is_slow)
        self._launch(lambda: self._sample(plan, grammar_bitmask, handle))
        return handle

    idle_seconds = None

    def check(self) -> None:
        """There are no other ranks."""

    def exchange_drafter(self, swap: Callable[[], None]) -> None:
        raise AssertionError("there is no drafter")

    def load_elsewhere(self, model: str) -> Callable[[], str | None]:
        raise AssertionError("there is no drafter")

    def drop_elsewhere(self) -> None:
        """There are no other ranks."""

    def shutdown(self) -> None:
        self.was_shut_down = True

    def _launch(self, job: Callable[[], None]) -> None:
        self._queue.append(job)
        while self._queue and not self._lazy:
            self._run_next()

    def _run_next(self) -> None:
        self._queue.popleft()()

    # --- the device ---

    def _forward(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self._slots[slot]
        for new in plan.new_requests:
            self._enter(new)
        for grown in plan.new_blocks:
            for table, ids in zip(self._slots[grown.slot].tables, grown.block_ids, strict=True):
                table.extend(ids)
        self._check_batch(plan)
        self._drafts[plan.step_id] = [self._drafts_of(row) for row in plan.rows]
        for row, drafts in zip(plan.rows, self._drafts[plan.step_id], strict=True):
            self._forward_row(row, drafts)

    def _enter(self, new: Any) -> None:
        assert new.slot not in self._slots and 0 <= new.slot < self.max_num_seqs
        assert 0 <= new.num_computed_tokens < len(new.token_ids) <= self.facts.max_model_len
        state = self._slots[new.slot] = Slot(
            tokens=list(new.token_ids),
            prefill_len=len(new.token_ids),
            prompt_len=new.prompt_len,
            num_computed=new.num_computed_tokens,
            tables=[list(table) for table in new.block_ids],
            wants_prompt_logprobs=new.sampling.prompt_logprobs is not None,
        )
        if new.num_computed_tokens:  # a prefix hit must hold the very same contents
            self._attend(state, new.num_computed_tokens, new.num_computed_tokens, state.tokens)
            self._draft_attend(state, new.num_computed_tokens)

    def _check_batch(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert rows and sum(row.num_tokens for row in rows) <= self.budget
        assert len({row.slot for row in rows}) == len(rows), "a request is scheduled twice"
        full = self.facts.needs.num_speculative_tokens + 1
        kinds = []
        for row in rows:
            assert row.num_tokens >= 1 and row.num_draft_tokens <= full - 1
            assert not row.num_draft_tokens or row.num_tokens == row.num_draft_tokens + 1
            extends = not row.is_prefill and row.num_tokens <= full
            kinds.append(0 if row.num_draft_tokens else 1 if extends else 2)
        assert kinds == sorted(kinds)
        drafted = [row.num_tokens for row in rows if row.num_draft_tokens]
        assert drafted == sorted(drafted, reverse=True)
        for slot, state in self._slots.items():
            for group, table in zip(self.facts.kv_groups, state.tables, strict=True):
                # otherwise old entries may belong to others by now
                if group.sliding_window is None:
                    assert 0 not in table and len(set(table)) == len(table), f"slot {slot}"

    def _drafts_of(self, row: ScheduledRow) -> list[int]:
        """The drafts in the row's layout: with -1 up to what was scheduled, unless trimmed."""
        drafts = self._slots[row.slot].drafts[: row.num_draft_tokens]
        drafts = drafts + [-1] * (row.num_draft_tokens - len(drafts))
        while self._trim and drafts and drafts[-1] < 0:
            drafts.pop()
        return drafts

    def _forward_row(self, row: ScheduledRow, drafts: list[int]) -> None:
        state = self._slots[row.slot]
        start = state.num_computed
        upper_end = row.num_computed_tokens + row.num_tokens
        assert start <= row.num_computed_tokens and upper_end <= self.facts.max_model_len
        assert row.num_output_tokens >= len(state.tokens) - state.prompt_len
        if start < state.prefill_len:
            assert start == row.num_computed_tokens and not drafts
            assert row.is_prefill == (start + row.num_tokens < state.prefill_len)
            known = state.tokens
            end = start + row.num_tokens
        else:
            assert not row.is_prefill and start == len(state.tokens) - 1
            known = state.tokens + drafts
            end = start + 1 + len(drafts)
        self._write(state, start, known[start:end])
        self._attend(state, start, end, known)

    def _write(self, state: Slot, start: int, values: list[int]) -> None:
        for position, value in enumerate(values, start):
            for group, kv, table in self._groups(state):
                block = table[position // group.block_size]
                assert block != 0, "a write to the null block"
                kv[block][position % group.block_size] = value

    def _attend(self, state: Slot, start: int, end: int, known: list[int]) -> None:
        """Check the keys that queries at start .. end - 1 read (a prefix check reads one more)."""
        for group, kv, table in self._groups(state):
            window = group.sliding_window or end + 1
            first = max(0, start - window + 1)
            seen = [
                kv[table[p // group.block_size]][p % group.block_size] for p in range(first, end)
            ]
            assert seen == known[first:end], f"attention reads {seen}, not {known[first:end]}"

    def _draft_write(self, state: Slot, start: int) -> None:
        """Let the drafter process the tokens from `start` on that are computed now."""
        for group, kv, table in zip(
            self.facts.kv_groups, self._draft_kv, state.tables, strict=True
        ):
            for position in range(start, state.num_computed):
                block = table[position // group.block_size]
                kv[block][position % group.block_size] = state.tokens[position + 1]

    def _draft_attend(self, state: Slot, end: int) -> None:
        """Check that a prefix hit of `end` tokens holds the drafter's KV for this continuation."""
        for group, kv, table in zip(
            self.facts.kv_groups, self._draft_kv, state.tables, strict=True
        ):
            if group.needs_next_token:
                window = group.sliding_window or end + 1
                for p in range(max(0, end - window + 1), end):
                    seen = kv[table[p // group.block_size]][p % group.block_size]
                    assert seen == state.tokens[p + 1], f"draft KV of {p} is another text's"

    def _groups(self, state: Slot) -> Any:
        return zip(self.facts.kv_groups, self._kv, state.tables, strict=True)

    def _sample(self, plan: StepPlan, bitmask: np.ndarray | None, handle: FakeHandle) -> None:
        layout = self._drafts.pop(plan.step_id)
        assert bitmask is None or len(bitmask) == sum(len(ids) + 1 for ids in layout)
        results, line = [], 0
        for row, drafts in zip(plan.rows, layout, strict=True):
            lines = None if bitmask is None else bitmask[line : line + len(drafts) + 1]
            line += len(drafts) + 1
            results.append(self._sample_row(row, drafts, lines))
        handle.results = results

    def _sample_row(
        self, row: ScheduledRow, drafts: list[int], lines: np.ndarray | None
    ) -> RowResult:
        state = self._slots[row.slot]
        prompt_logprobs = self._prompt_logprobs(state, row)
        start = state.num_computed
        if row.is_prefill:
            state.num_computed += row.num_tokens
            self._draft_write(state, start)
            return RowResult([], prompt_logprobs=prompt_logprobs)
        emitted: list[int] = []
        for index in range(len(drafts) + 1):
            line = None if lines is None else lines[index]
            emitted.append(next_token(state.tokens + emitted, self.facts.vocab_size, line))
            if index == len(drafts) or drafts[index] != emitted[-1]:
                break
        state.tokens += emitted
        state.num_computed = len(state.tokens) - 1
        self._draft_write(state, start)
        assert len(state.tokens) <= self.facts.max_model_len
        self._propose(state)
        num_real = sum(draft >= 0 for draft in drafts)
        logprobs = [(token, -1.0, 1, [token], [-1.0]) for token in emitted]
        has_nan = row.slot in self.nan_slots
        return RowResult(emitted, num_real, logprobs, prompt_logprobs, has_nan)

    def _prompt_logprobs(self, state: Slot, row: ScheduledRow) -> Any:
        start = state.num_computed
        end = min(start + row.num_tokens, state.prompt_len - 1)
        if not state.wants_prompt_logprobs or end <= start:
            return None
        return [(token, -float(token), 1, [], []) for token in state.tokens[start + 1 : end + 1]]

    def _propose(self, state: Slot) -> None:
        """Draft the true continuation, sometimes with wrong tokens or gaps (-1)."""
        needs = self.facts.needs
        state.drafts = []
        for _ in range(needs.num_speculative_tokens):
            token = next_token(state.tokens + state.drafts, self.facts.vocab_size)
            if self._random.random() > self._accuracy:
                token = self._random.randrange(-1, self.facts.vocab_size)
            state.drafts.append(token)
        end = min(state.num_computed + needs.num_lookahead_tokens, self.facts.max_model_len)
        self._write(state, state.num_computed, [GARBAGE] * (end - state.num_computed))
