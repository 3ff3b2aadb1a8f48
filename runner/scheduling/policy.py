"""The scheduler's stateless decisions: queue order, row sizes and batch order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...configs.options import ConfigError
from ...configs.schema import StepLimits
from .plan import ScheduledRow, StepPlan
from .request import Request

# A request, its incarnation when the row was scheduled, and the row. If the request's incarnation
# has changed since, it finished or was preempted: the row is stale and its result is discarded.
RowInFlight = tuple[Request, int, ScheduledRow]

CPU_STEP_TOKENS = 256  # about a second on two cores; larger steps are no faster per token
# Tokens of prompts in a step in which a request decodes, on a GPU. Larger steps are no faster per
# token. If a few long steps had all prompts, the decodes between them would read the weights alone.
BESIDE_DECODES = 3072


def step_tokens(limits: StepLimits, chunked: bool, is_cpu: bool, num_drafts: int) -> int:
    """The token budget of one step: its limit, on a CPU at most about a second of work.

    A step cannot be interrupted: until it ends, no other request gets a token and the memory of
    aborted requests is not freed. Even the limited budget lets every running request verify all
    its drafts. `StepTimes` shortens steps further while some request decodes.
    """
    if not is_cpu or not chunked:
        return limits.max_num_batched_tokens
    short = max(CPU_STEP_TOKENS, limits.max_num_seqs * (num_drafts + 1))
    return min(limits.max_num_batched_tokens, short)


class RequestQueue:
    """Requests sorted by (priority, arrival)."""

    def __init__(self) -> None:
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Request:
        return self._items[index]

    def add(self, request: Request) -> None:
        insort(self._items, request, key=lambda item: item.order)

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue."""
        index = bisect_left(self._items, request.order, key=lambda item: item.order)
        assert self._items[index] is request
        del self._items[index]


def spread(tokens: int, beside_decodes: int | None, running: RequestQueue, width: int) -> int:
    """At most `tokens` of a step: those of each request that decodes, `width`, and of prompts
    `beside_decodes`. Without a limit of these, or if no request decodes, all of them."""
    decodes = 0
    if beside_decodes is not None:
        decodes = sum([not request.is_prefilling for request in running])
    return min(tokens, beside_decodes + decodes * width) if beside_decodes and decodes else tokens


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The limits on a row's size other than the token budget.

    With `uniform_drafts` a request near its max_tokens still gets K drafts, though it cannot use
    them all, because the FULL graph needs a uniform batch. Otherwise it gets only as many drafts
    as it can use.
    """

    max_model_len: int
    num_speculative_tokens: int
    uniform_drafts: bool = False
    ignore_caps: bool = False  # requests with fewer drafts get K rows, too, filled up with -1

    @classmethod
    def of(
        cls,
        max_num_batched_tokens: int,
        chunked: bool,
        max_model_len: int,
        num_speculative_tokens: int,
        uniform_drafts: bool,
    ) -> RowLimits:
        """The limits of a scheduler; raises ConfigError if a prompt must be one row that no step
        could hold."""
        if not chunked and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"Without chunked prefill, max_num_batched_tokens {max_num_batched_tokens} "
                f"must be at least max_model_len {max_model_len}."
            )
        return cls(max_model_len, num_speculative_tokens, uniform_drafts)

    def of_step(self, running: Iterable[Request]) -> RowLimits:
        """The limits for a step of these requests.

        If their caps on drafts differ, ignores the caps so that the step can use a FULL graph.
        """
        if not self.uniform_drafts or not self.num_speculative_tokens:
            return self
        caps = {request.max_drafts for request in running}
        return replace(self, ignore_caps=True) if len(caps) > 1 else self


def next_row(request: Request, limits: RowLimits, available: int) -> ScheduledRow | None:
    """The running request's row in this step, of at most `available` (> 0) tokens.

    None if the request is already certain to finish, or if the steps in flight may fill it up to
    max_model_len. A decode row emits up to drafts + 1 tokens after the `max_len` tokens known at
    most, and their sum may not exceed max_model_len, so no position exceeds max_model_len - 2.
    max_total_len is compared with the lower bound of known tokens instead: a surplus token is
    cut later, whereas a missing row would stall the request.
    """
    if request.num_prefilled < request.prefill_len:
        return prefill_row(request, available)
    known = len(request.token_ids)  # inlines properties of the request, for speed
    max_len = known + request.num_placeholders
    missing = request.max_total_len - known - request.num_sampling_in_flight
    if missing <= 0:
        return None
    drafts = limits.num_speculative_tokens
    if drafts:
        cap = request.max_drafts
        if cap is not None and cap < drafts and not limits.ignore_caps:
            drafts = max(0, cap)
        if drafts >= missing and not limits.uniform_drafts:
            drafts = missing - 1
    room = limits.max_model_len - max_len
    if room > available:
        room = available
    if drafts >= room:
        drafts = room - 1
        if drafts < 0:
            return None
    num_output = max_len - request.prompt_len
    return ScheduledRow(request.slot, drafts + 1, drafts, max_len - 1, False, num_output)


def prefill_row(request: Request, available: int) -> ScheduledRow:
    """The next chunk of the known tokens, at most `available`.

    The last chunk samples, so its `is_prefill` is False.
    """
    remaining = request.prefill_len - request.num_prefilled
    return ScheduledRow(
        slot=request.slot,
        num_tokens=min(remaining, available),
        num_draft_tokens=0,
        num_computed_tokens=request.num_prefilled,
        is_prefill=available < remaining,
        num_output_tokens=request.num_output_tokens,
    )


def batch_order(row: ScheduledRow, decode_query_len: int) -> tuple[int, int]:
    """Sort key of a batch row: rows with drafts, longest first; then short extends; then prefills.

    The rows that a back end treats as decodes (at most K + 1 tokens) are thus a prefix of the
    batch.
    """
    if row.num_draft_tokens:
        return 0, decode_query_len - row.num_tokens
    if not row.is_prefill and row.num_tokens <= decode_query_len:
        return 1, row.num_tokens
    return 2, row.num_tokens


def sort_rows(entries: list[RowInFlight], decode_query_len: int) -> list[ScheduledRow]:
    """Sort a step's entries into batch order, in place, and return their rows."""
    rows = [row for _, _, row in entries]
    tokens, drafts = rows[0].num_tokens, rows[0].num_draft_tokens
    for row in rows:  # usually all rows are alike and need no sorting
        if row.num_tokens != tokens or row.num_draft_tokens != drafts or row.is_prefill:
            break
    else:
        return rows
    entries.sort(key=lambda entry: batch_order(entry[2], decode_query_len))
    return [row for _, _, row in entries]


def fill_plan(
    plan: StepPlan, entries: list[RowInFlight], decode_query_len: int, has_grammars: bool
) -> None:
    """Give the plan its rows, sorted with `entries`, and note whether a grammar masks any.

    The masks have one line per real draft, so the drafts of all rows must then be known.
    """
    plan.rows = sort_rows(entries, decode_query_len)
    if has_grammars:
        plan.has_grammar = any(
            request.matcher is not None and not row.is_prefill for request, _, row in entries
        )
        has_drafts = any(row.num_draft_tokens for row in plan.rows)
        plan.needs_draft_ids = plan.has_grammar and has_drafts
