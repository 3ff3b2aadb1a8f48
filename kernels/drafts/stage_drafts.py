"""Begins and ends a proposal: fills a drafter's buffers from the target's step, stores its drafts.

A token row has the target's hidden state of its position, and the token that follows; positions are
not shifted. Rejected rows stay in the batch, since leaving them out would wait for the device. A
graph may hold both functions: padded rows, with slot -1 after all others, are found on the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..batch.padded_step import rows_of, slots_of
from ..operation import operation


class TargetStep(Protocol):
    """The tensors of the target's step that a drafter reads, of N* rows and M* tokens."""

    @property
    def input_ids(self) -> Tensor: ...  # [>= M*] int32
    @property
    def positions(self) -> Tensor: ...  # [>= M*] int64
    @property
    def query_start_loc(self) -> Tensor: ...  # [>= N* + 1] int32
    @property
    def idx_mapping(self) -> Tensor: ...  # [>= N*] int32, batch row -> slot
    @property
    def seq_lens(self) -> Tensor: ...  # [>= N*] int32, before rejection
    @property
    def num_sampled(self) -> Tensor: ...  # [>= N*] int32
    @property
    def num_rejected(self) -> Tensor: ...  # [>= N*] int32


class DraftedRequests(Protocol):
    """The columns of the request table that are read, by slot."""

    last_sampled_tokens: Tensor  # [R] int64, after post_update
    next_prefill_tokens: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    max_drafts: Tensor  # [R] int32


class DraftBuffers(Protocol):
    """A drafter's buffers, by batch row [R] or token row [T]; see `DraftModelSpeculator`."""

    input_ids: Tensor  # [T] int32, shifted by one
    positions: Tensor  # [T] int64
    last_token_indices: Tensor  # [R] int64
    idx_mapping: Tensor  # [R] int32, padded -1
    query_start_loc: Tensor  # [R + 1] int32, min(i, N)
    decode_positions: Tensor  # [R] int64
    seq_lens: Tensor  # [R] int32, padded 0
    noise_positions: Tensor  # [R] int64
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    allowed: Tensor  # [R] int32, drafts that the request may keep
    draft_tokens: Tensor  # [R, K] int64
    step: Tensor  # [R] int64, number of drafts made


def stage_draft_rows_reference(
    of: TargetStep,
    requests: DraftedRequests,
    out: DraftBuffers,
    num_reqs: int,  # N, or N* whose padded rows have slot -1
    num_tokens: int,  # M*
    max_position: int,
) -> None:
    """Fill the drafter's buffers `out` from the target's step.

    Padding is filled too: rows to the end of the buffers, tokens to M*. Ids are shifted by one, so
    that each row has the token after it. A request's last valid row (query start + query length -
    rejected - 1) gets the newest token, or the next one of the prompt; its decodes begin there, and
    the rows after it get id 0. `allowed` is the request's limit of drafts, less those beyond
    `max_position`, and 0 until its prompt is finished.
    """
    live, slots = slots_of(of.idx_mapping, num_reqs)
    num_sampled, num_rejected = of.num_sampled[:num_reqs], of.num_rejected[:num_reqs]
    ends = of.query_start_loc[1 : num_reqs + 1]
    last = torch.where(live, ends.long() - num_rejected - 1, 0)  # [N] batch row -> token row
    newest, prompt = requests.last_sampled_tokens[slots], requests.next_prefill_tokens[slots]
    following = torch.where(num_sampled > 0, newest, prompt).int()

    tokens, rows, real = rows_of(ends, num_tokens)  # [M*] token row -> batch row
    shifted = torch.roll(of.input_ids[:num_tokens], -1)
    ids = torch.where(tokens < last[rows], shifted, 0)
    ids = torch.where(tokens == last[rows], following[rows], ids)
    out.input_ids[:num_tokens] = torch.where(real & live[rows], ids, 0)
    positions = of.positions[:num_tokens].clamp(max=max_position - 1)
    out.positions[:num_tokens] = torch.where(real, positions, 0)

    at = torch.where(live, of.positions[last], 0)
    caps = torch.minimum(requests.max_drafts[slots], max_position - at)
    caps = caps.clamp(min=0, max=out.draft_tokens.shape[1])
    columns = (
        (out.last_token_indices, last, 0),
        (out.idx_mapping, of.idx_mapping[:num_reqs], -1),
        (out.decode_positions, at, 0),
        (out.seq_lens, torch.where(live, of.seq_lens[:num_reqs] - num_rejected, 0), 0),
        (out.noise_positions, at + 1, 1),
        (out.temperature, torch.where(live, requests.temperature[slots], 0.0), 0),
        (out.seed, torch.where(live, requests.seed[slots], 0), 0),
        (out.allowed, torch.where(live & (num_sampled > 0), caps, 0), 0),
    )
    for column, value, padding in columns:
        column[:num_reqs] = value
        column[num_reqs:] = padding
    starts = torch.arange(out.query_start_loc.shape[0], device=slots.device)
    out.query_start_loc.copy_(torch.minimum(starts, live.sum()))
    out.step.zero_()


stage_draft_rows = operation(stage_draft_rows_reference, "out.input_ids", ".triton.stage_drafts")


def store_draft_rows_reference(
    of: DraftBuffers,
    most_drafts: Tensor,  # [>= N*] int32, by batch row: the step's limit
    out: Tensor,  # [R, K] int64 by slot
    num_reqs: int,  # N*
    num_made: int,  # drafts that were made, <= K
) -> None:
    """Write each request's drafts to its slot, with -1 beyond `of.allowed` and `most_drafts`.

    Drafts beyond `of.allowed` also become -1 in `of.draft_tokens`.
    """
    steps = torch.arange(out.shape[1], device=out.device)
    own = (steps < of.allowed[:num_reqs, None]) & (steps < num_made)
    made = torch.where(own, of.draft_tokens[:num_reqs], -1)
    of.draft_tokens[:num_reqs, :num_made] = made[:, :num_made]
    kept = torch.where(steps < most_drafts[:num_reqs, None], made, -1)
    present, rows = _row_of_slot(of.idx_mapping, num_reqs, out.shape[0])
    out.copy_(torch.where(present[:, None], kept[rows], out))


store_draft_rows = operation(store_draft_rows_reference, "out", ".triton.stage_drafts")


def _row_of_slot(idx_mapping: Tensor, num_reqs: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Which slots are in the batch ([R] bool), and their batch rows ([R] int64, otherwise 0)."""
    live, slots = slots_of(idx_mapping, num_reqs)
    at = torch.where(live, slots, num_slots)
    rows = torch.full((num_slots + 1,), -1, device=slots.device)
    rows = rows.scatter(0, at, torch.arange(num_reqs, device=slots.device))[:num_slots]
    return rows >= 0, rows.clamp(min=0)
