"""Draws one more draft for every row of a drafter, keeps it, and what it was drawn from.

A draft is the argmax of its row's logits over temperature plus the noise of
`kernels.sampling.sample`. The scaled logits, whose softmax is q, go straight to the request's slot,
and only for rows that draw: verification reads no q of a greedy request. Places of ids that a
drafter cannot draw are never written; they hold -inf from the start. All may stand in a graph: slot
-1 = a padded row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..batch.padded_step import slots_of
from ..device import use_triton
from ..sampling.sample import DRAFT, gumbel_sample_reference


class DraftRows(Protocol):
    """A drafter's buffers by batch row [R]; see `DraftModelSpeculator`."""

    idx_mapping: Tensor  # [R] int32, batch row -> slot, padded -1
    temperature: Tensor  # [R] float32, 0 = greedy
    seed: Tensor  # [R] int64
    noise_positions: Tensor  # [R] int64, position of the target row that draws the token
    step: Tensor  # [R] int64, which draft is made next
    draft_tokens: Tensor  # [R, K] int64
    decode_ids: Tensor  # [R] int32, newest draft


def draw_drafts(
    logits: Tensor,  # [N*, draft vocabulary], the model's dtype
    of: DraftRows,
    to_target: Tensor | None,  # [draft vocabulary] int64 -> the target's ids; None = the same
    kept: Tensor | None,  # [R, K, V] float32 by slot; None: drafts are the likeliest tokens
) -> None:
    """Draw from `logits` what `take_drafts` then takes; keep the distributions in `kept`.

    Without `to_target`, ids beyond V are not drawn. A step beyond K draws, and keeps nothing.
    """
    assert kept is None or (kept.is_contiguous() and kept.shape[1] == of.draft_tokens.shape[1])
    if kept is not None and to_target is None:  # padded vocabularies differ: the smaller counts
        logits = logits[:, : kept.shape[2]]
    if use_triton(logits):
        from .triton.draw_drafts import draw_drafts as draw_drafts_triton

        draw_drafts_triton(logits, of, to_target, kept)
    else:
        draw_drafts_reference(logits, of, to_target, kept)


def draw_drafts_reference(
    logits: Tensor, of: DraftRows, to_target: Tensor | None, kept: Tensor | None
) -> None:
    """The plain version of `draw_drafts`."""
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
    """kept: [R * K, V]; lines: [N*] int64; wanted: [N*] bool; new: [N*, draft vocabulary]."""
    if ids is None:
        kept = kept[:, : new.shape[1]]
    # One row after the other, since padded rows stand for slot 0 and must change nothing.
    for row in range(new.shape[0]):
        line, is_wanted = lines[row : row + 1], wanted[row : row + 1]
        if ids is None:
            before = kept.index_select(0, line)
            kept.index_copy_(0, line, torch.where(is_wanted, new[row], before))
        else:
            kept[line, ids] = torch.where(is_wanted, new[row], kept[line, ids])


def take_drafts(
    ids: Tensor,  # [N*] int64, the draft vocabulary's
    of: DraftRows,
    to_target: Tensor | None,  # [draft vocabulary] int64
) -> None:
    """Make these each row's next draft and the input of its next decode, and step on."""
    if use_triton(ids):
        from .triton.draw_drafts import take_drafts as take_drafts_triton

        take_drafts_triton(ids, of, to_target)
    else:
        take_drafts_reference(ids, of, to_target)


def take_drafts_reference(ids: Tensor, of: DraftRows, to_target: Tensor | None) -> None:
    """The plain version of `take_drafts`."""
    rows = ids.shape[0]
    if to_target is not None:
        ids = to_target[ids]
    columns = torch.arange(of.draft_tokens.shape[1], device=ids.device)
    taken = columns == of.step[:rows, None]  # none where the step is beyond K
    of.draft_tokens[:rows] = torch.where(taken, ids[:, None], of.draft_tokens[:rows])
    of.decode_ids[:rows] = ids
    of.noise_positions[:rows] += 1
    of.step[:rows] += 1
