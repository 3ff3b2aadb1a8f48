"""Draws the next draft of every row of a drafter, and stores it with its distribution.

A draft is argmax(logits / temperature + noise), with the noise of `kernels.sampling.sample`. The
scaled logits, of which the softmax is the distribution q, are written to the request's slot. Greedy
rows write none, since their verification does not need q. Entries of ids that the drafter cannot
draw are never written and stay -inf. A graph may hold all of this; padded rows have slot -1.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..batch.padded_step import slots_of
from ..device import use_triton
from ..operation import operation
from ..sampling.sample import DRAFT, gumbel_sample_reference


class DraftRows(Protocol):
    """A drafter's buffers, by batch row; see `DraftModelSpeculator`."""

    idx_mapping: Tensor  # [R] int32, batch row -> slot, padded -1
    temperature: Tensor  # [R] float32, 0 = greedy
    seed: Tensor  # [R] int64
    noise_positions: Tensor  # [R] int64, position of the target's row that would draw this token
    step: Tensor  # [R] int64, the index of the next draft
    draft_tokens: Tensor  # [R, K] int64
    decode_ids: Tensor  # [R] int32, newest draft


def draw_drafts(
    logits: Tensor,  # [N*, draft vocabulary], the model's dtype
    of: DraftRows,
    to_target: Tensor | None,  # [draft vocabulary] int64 -> the target's ids; None = the same
    kept: Tensor | None,  # [R, K, V] float32 by slot; None: every draft is an argmax
) -> None:
    """Draw each row's next draft, store it as `take_drafts` does, and keep its scaled logits.

    The logits / temperature of a row go to `kept` at the request's slot and the row's step, unless
    the row is greedy or padded, or its step is K or more. If `kept` is None, every draft is the
    likeliest token. With `kept` but without `to_target`, only ids below V are drawn.
    """
    assert kept is None or (kept.is_contiguous() and kept.shape[1] == of.draft_tokens.shape[1])
    if kept is not None and to_target is None:  # padded vocabularies differ: use the smaller
        logits = logits[:, : kept.shape[2]]
    if use_triton(logits):
        from .triton.draw_drafts import draw_drafts as draw_drafts_triton

        draw_drafts_triton(logits, of, to_target, kept)
    else:
        draw_drafts_reference(logits, of, to_target, kept)


def draw_drafts_reference(
    logits: Tensor, of: DraftRows, to_target: Tensor | None, kept: Tensor | None
) -> None:
    """The plain version of `draw_drafts`, which has cut the logits to at most V columns."""
    if kept is None:
        ids = logits.argmax(dim=-1)
    else:
        rows = logits.shape[0]
        temperature = of.temperature[:rows]
        greedy = temperature <= 0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        keys = (of.seed[:rows], of.noise_positions[:rows], DRAFT, greedy)
        ids = gumbel_sample_reference(scaled, *keys)
        live, slots = slots_of(of.idx_mapping, rows)
        step = of.step[:rows]
        lines = slots * kept.shape[1] + step.clamp(max=kept.shape[1] - 1)  # [N*] of [R * K, V]
        wanted = live & ~greedy & (step < kept.shape[1])
        _keep(kept.flatten(0, 1), lines, wanted, scaled, to_target)
    take_drafts_reference(ids, of, to_target)


def _keep(kept: Tensor, lines: Tensor, wanted: Tensor, new: Tensor, ids: Tensor | None) -> None:
    """Write the rows of `new` that are `wanted` to `lines` of `kept`, at the columns `ids`.

    kept: [R * K, V]; lines: [N*] int64; wanted: [N*] bool; new: [N*, draft vocabulary];
    ids: [draft vocabulary] int64, None = the first columns.
    """
    if ids is None:
        kept = kept[:, : new.shape[1]]
    # Row by row, since padded rows are mapped to slot 0 and must not change it.
    for row in range(new.shape[0]):
        line, is_wanted = lines[row : row + 1], wanted[row : row + 1]
        if ids is None:
            before = kept.index_select(0, line)
            kept.index_copy_(0, line, torch.where(is_wanted, new[row], before))
        else:
            kept[line, ids] = torch.where(is_wanted, new[row], kept[line, ids])


def take_drafts_reference(
    ids: Tensor,  # [N*] int64, the draft vocabulary's
    of: DraftRows,
    to_target: Tensor | None,  # [draft vocabulary] int64
) -> None:
    """Store each row's next draft, make it the input of the next decode, and advance the step.

    If the step is K or more, the draft is only the next input: `draft_tokens` has no place for it.
    """
    rows = ids.shape[0]
    if to_target is not None:
        ids = to_target[ids]
    columns = torch.arange(of.draft_tokens.shape[1], device=ids.device)
    taken = columns == of.step[:rows, None]  # none if the step is beyond K
    of.draft_tokens[:rows] = torch.where(taken, ids[:, None], of.draft_tokens[:rows])
    of.decode_ids[:rows] = ids
    of.noise_positions[:rows] += 1
    of.step[:rows] += 1


take_drafts = operation(take_drafts_reference, "ids", ".triton.draw_drafts")
