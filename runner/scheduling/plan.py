"""What the scheduler tells the model runner about one step: plain data, no tensors, no behaviour.

A *slot* is a request's permanent row in the request table. Block ids are per KV group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..messages import SamplingParams


@dataclass(slots=True)
class NewRequest:
    """A request that enters a slot in this step (first time, or again after preemption)."""

    slot: int
    token_ids: list[int]  # prompt, then (after preemption) the output so far
    prompt_len: int
    num_computed_tokens: int  # from the prefix cache
    block_ids: list[list[int]]  # [num_groups][num_blocks]
    sampling: SamplingParams


class NewBlocks(msgspec.Struct, gc=False):
    """Blocks appended to a running request's tables in this step."""

    slot: int
    block_ids: list[list[int]]  # [num_groups][num_new_blocks], possibly empty per group


class ScheduledRow(msgspec.Struct, gc=False):  # a struct: hundreds are made in every step
    """One request's share of the step. Rows are in batch order: drafted first, prefills last."""

    slot: int
    num_tokens: int  # query length: scheduled tokens, drafts included
    num_draft_tokens: int  # upper bound: the runner may find fewer real drafts (ids of -1)
    num_computed_tokens: int  # host's upper bound before this step
    is_prefill: bool  # True while this step does not reach the last known token
    num_output_tokens: int  # host's upper bound of tokens emitted before this step
    num_deferred: int = 0  # tokens before this row that the drafter has not taken in yet
    num_behind: int = 0  # and after this step
    next_drafts: int | None = None  # at most so many drafts for its next row; None = the step's


@dataclass(slots=True)
class StepPlan:
    """One step."""

    step_id: int
    freed_slots: list[int] = field(default_factory=list)  # finished, aborted or preempted before it
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)
    has_grammar: bool = False  # a grammar masks some row
    needs_draft_ids: bool = False  # it must see the real drafts before sampling
    num_drafts: int | None = None  # to make after this step, for the next one; None = K
    draft_reason: str = ""  # why so many
    defers_drafter: bool = False  # the drafter takes this step's tokens in later


class RowResult(msgspec.Struct, gc=False):
    """What a step gave for one `ScheduledRow`, in the same order; empty for a prefill chunk."""

    token_ids: list[int]  # emitted: accepted drafts, then one recovered or bonus token
    num_draft_tokens: int = 0  # real drafts verified (ids != -1)
    logprobs: list[tuple[int, float, int, list[int], list[float]]] | None = None
    prompt_logprobs: list[tuple[int, float, int, list[int], list[float]]] | None = None  # a chunk's
    has_nan: bool = False  # the row's logits held NaN: the request ends with an error
    error: str | None = None  # its parameters could not be taken in: as has_nan, in one sentence
