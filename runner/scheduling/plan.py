"""The scheduler's plan of one step for the model runner: plain data, no tensors, no behaviour.

A *slot* is a request's permanent row in the request table. Block ids are per KV group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..messages import SamplingParams


@dataclass(slots=True)
class NewRequest:
    """A request that enters a slot in this step, for the first time or after a preemption."""

    slot: int
    token_ids: list[int]  # the prompt, then any output from before a preemption
    prompt_len: int
    num_computed_tokens: int  # tokens found in the prefix cache
    block_ids: list[list[int]]  # [num_groups][num_blocks]
    sampling: SamplingParams
    snapshot: int = 0  # the block of its saved recurrent state; 0 = none


class NewBlocks(msgspec.Struct, gc=False):
    """Blocks appended to a running request's block tables in this step."""

    slot: int
    block_ids: list[list[int]]  # [num_groups][num_new_blocks]; a group's list may be empty


class NewSnapshot(msgspec.Struct, gc=False):
    """Save a slot's recurrent states into `block` when they have absorbed `border` tokens."""

    slot: int
    border: int
    block: int


class ScheduledRow(msgspec.Struct, gc=False):  # cheaper to create than a dataclass
    """One request's row of the step. Batch order puts rows with drafts first and prefills last."""

    slot: int
    num_tokens: int  # query length, drafts included
    num_draft_tokens: int  # upper bound: the runner may find fewer real drafts (the rest are -1)
    num_computed_tokens: int  # upper bound before this step
    is_prefill: bool  # True if known tokens remain after this step, so that it does not sample
    num_output_tokens: int  # upper bound of tokens emitted before this step
    num_deferred: int = 0  # tokens before this row that the drafter has not processed yet
    num_behind: int = 0  # tokens that it will not have processed after this step
    next_drafts: int | None = None  # most drafts for the request's next row; None = the step's K


@dataclass(slots=True)
class StepPlan:
    step_id: int
    freed_slots: list[int] = field(default_factory=list)  # of requests finished, aborted, preempted
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    snapshots: list[NewSnapshot] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)
    has_grammar: bool = False  # a grammar masks at least one row
    needs_draft_ids: bool = False  # the masks need the real draft ids before sampling
    num_drafts: int | None = None  # drafts to make after this step; None = K
    draft_reason: str = ""  # why `num_drafts` was chosen
    defers_drafter: bool = False  # the drafter processes this step's tokens later
    # Of a step without rows: another engine that shares the experts has called to this wave.
    wave: int | None = None


class RowResult(msgspec.Struct, gc=False):
    """The result of one `ScheduledRow`, in the same order. A prefill chunk emits no tokens."""

    token_ids: list[int]  # emitted: accepted drafts, then one recovered or bonus token
    num_draft_tokens: int = 0  # real drafts verified (ids != -1)
    logprobs: list[tuple[int, float, int, list[int], list[float]]] | None = None
    # Those of this row's part of the prompt.
    prompt_logprobs: list[tuple[int, float, int, list[int], list[float]]] | None = None
    has_nan: bool = False  # the row's logits held NaN; the request ends with an error
    draft_token_ids: list[int] | None = None  # drafts verified, for requests that report them
    error: str | None = None  # the sampling parameters could not be applied; ends the request
