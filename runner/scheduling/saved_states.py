"""Where the scheduler's rows meet saved recurrent states: chunks end at borders, and save there."""

from __future__ import annotations

from .plan import NewSnapshot, ScheduledRow, StepPlan
from .request import Request
from .state_snapshots import StateSnapshots


def to_border(snapshots: StateSnapshots, request: Request, available: int) -> int:
    """Cut the next row of `available` tokens so that a prompt's chunk ends where its state can be
    saved."""
    if not request.is_prefilling or available <= 0:
        return available
    blocks, start = request.blocks, request.num_prefilled
    assert blocks is not None and blocks.snapshots is not None
    count = min(available, request.prefill_len - start)
    shorter = snapshots.shorten(blocks.snapshots, request.hashes, start, count)
    return shorter if shorter < count else available


def save_state(
    snapshots: StateSnapshots, request: Request, row: ScheduledRow, plan: StepPlan
) -> None:
    """Let the step, or the one that knows what was accepted, save the state if the row reaches a
    border."""
    blocks = request.blocks
    assert blocks is not None and blocks.snapshots is not None
    start, count = row.num_computed_tokens, row.num_tokens
    saving = snapshots.plan(blocks.snapshots, request.hashes, start, count)
    if saving is not None:
        plan.snapshots.append(NewSnapshot(request.slot, saving.border, saving.block))


def land_state(
    snapshots: StateSnapshots, request: Request, row: ScheduledRow, num_kept: int
) -> None:
    """Publish the states that are saved now that a row has landed and emitted `num_kept` tokens."""
    blocks = request.blocks
    assert blocks is not None and blocks.snapshots is not None
    start = row.num_computed_tokens
    if not row.is_prefill:  # that was an upper bound
        num_known = len(request.token_ids) - num_kept
        start = num_known - (row.num_tokens - row.num_draft_tokens)
    snapshots.land(blocks.snapshots, request.hashes, start, row.num_tokens)
