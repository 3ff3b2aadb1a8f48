"""The scheduler's decisions that need no state of its own: queue order, row sizes, batch order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..configs.schema import SchedulerConfig
from .plan import ScheduledRow
from .request import Request

CPU_STEP_TOKENS = 256  # about a second on two cores, which larger steps do not use better


def step_tokens(config: SchedulerConfig, is_cpu: bool, num_drafts: int) -> int:
    """The token budget of one step: what is configured, but on a CPU no more than a second's work.

    A step cannot be interrupted: until it ends no other request gets a token, and what an aborted
    one holds stays taken. Every request that may run still has room for its drafts.
    """
    if not is_cpu or not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    short = max(CPU_STEP_TOKENS, config.max_num_seqs * (num_drafts + 1))
    return min(config.max_num_batched_tokens, short)


class RequestQueue:
    """Requests by (priority, arrival)."""

    def __init__(self) -> None:
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Request:
        return self._items[index]

    def add(self, request: Request) -> None:
        """Insert at its place."""
        insort(self._items, request, key=lambda item: item.order)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        index = bisect_left(self._items, request.order, key=lambda item: item.order)
        assert self._items[index] is request
        del self._items[index]


@dataclass(frozen=True)
class RowLimits:
    """What bounds a row beside the token budget.

    With `uniform_drafts` a request near its max_tokens still gets K drafts, useless as they are:
    the batch stays uniform and its FULL graph fits. Without, it gets only drafts it can use.
    """

    max_model_len: int
    num_speculative_tokens: int
    uniform_drafts: bool = False
    ignore_caps: bool = False  # schedule K rows for a request that drafts fewer: they hold -1

    def of_step(self, running: Iterable[Request]) -> RowLimits:
        """The limits of a step of these requests.

        One request with a cap on drafts must not cost the others their FULL graph.
        """
        if not self.uniform_drafts:
            return self
        caps = {request.max_drafts for request in running}
        return replace(self, ignore_caps=True) if len(caps) > 1 else self


def num_drafts_allowed(request: Request, limits: RowLimits) -> int:
    """Drafts for the next decode row; negative when not even a plain row may run now.

    The row emits up to drafts + 1 tokens after `max_len` known ones, and that may not pass
    max_model_len (so no position passes max_model_len - 2). max_total_len is held against the lower
    bound instead: a token too many is cut, a row too few would stall the request.
    """
    drafts = limits.num_speculative_tokens
    if request.max_drafts is not None and not limits.ignore_caps:
        drafts = min(drafts, max(0, request.max_drafts))
    if not limits.uniform_drafts:
        drafts = min(drafts, request.max_total_len - request.min_len - 1)
    return min(drafts, limits.max_model_len - request.max_len - 1)


def next_row(request: Request, limits: RowLimits, available: int) -> ScheduledRow | None:
    """The running request's share of this step, at most `available` (> 0) tokens.

    None if its finish is already certain, or if what is in flight may fill it up to max_model_len.
    """
    if request.is_prefilling:
        return prefill_row(request, available)
    if request.min_len >= request.max_total_len:
        return None
    num_drafts = min(num_drafts_allowed(request, limits), available - 1)
    if num_drafts < 0:
        return None
    assert request.num_computed_tokens == request.max_len - 1
    return ScheduledRow(
        slot=request.slot,
        num_tokens=num_drafts + 1,
        num_draft_tokens=num_drafts,
        num_computed_tokens=request.num_computed_tokens,
        is_prefill=False,
        num_output_tokens=request.max_len - request.prompt_len,
    )


def prefill_row(request: Request, available: int) -> ScheduledRow:
    """The next chunk of the known tokens. The last chunk samples, so it is no prefill row."""
    remaining = request.prefill_len - request.num_computed_tokens
    return ScheduledRow(
        slot=request.slot,
        num_tokens=min(remaining, available),
        num_draft_tokens=0,
        num_computed_tokens=request.num_computed_tokens,
        is_prefill=available < remaining,
        num_output_tokens=request.num_output_tokens,
    )


def batch_order(row: ScheduledRow, decode_query_len: int) -> tuple[int, int]:
    """Sort key of a batch row: drafted rows, full length first; then short extends; then prefills.

    So rows that a back end treats as decodes (at most K + 1 tokens) are a prefix of the batch.
    """
    if row.num_draft_tokens:
        return 0, decode_query_len - row.num_tokens
    if not row.is_prefill and row.num_tokens <= decode_query_len:
        return 1, row.num_tokens
    return 2, row.num_tokens
