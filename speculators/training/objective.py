"""What training minimises and what it measures: loss by draft, agreement, acceptance length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .head import TrainingHead


@dataclass(frozen=True)
class Batch:
    """Sequences side by side, padded on the right; what the target made of them."""

    taps: Tensor  # [B, T, taps * H]
    embeddings: Tensor  # [B, T, H]
    draft_logits: Tensor  # [B, T, D] the target's logits of the draft vocabulary
    target_ids: Tensor  # [B, T] int64, what the target finds most likely after each position
    token_ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    prompt_lengths: Tensor  # [B] int64


@dataclass(frozen=True)
class Measured:
    """One pass over a batch. The loss carries the gradient; the rest are counts on the device."""

    loss: Tensor  # scalar
    agreed: Tensor  # [K] float, chains whose draft k is the target's choice
    counted: Tensor  # [K] float, chains that have a draft k
    matched: Tensor | None = None  # [B, T, K] bool: draft k from row t is the token that follows


def measure(
    head: TrainingHead,
    batch: Batch,
    to_target: Tensor,  # [D] int64, draft id -> target id
    has_draft_id: Tensor,  # [V] bool
    num_steps: int,  # K
    decay: float,  # weight of draft k in the loss: decay ** k
    keep_matches: bool = False,
) -> Measured:
    """Soft cross-entropy against the target over the draft vocabulary, averaged by draft.

    A chain counts where its first token belongs to the reply, and where the target's choice has a
    draft id at all; agreement counts the latter's absence as a miss.
    """
    wanted = batch.draft_logits.float().softmax(-1)  # [B, T, D]
    losses, weights, agreed, counted, matched = [], [], [], [], []
    rows = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    begins = rows >= batch.prompt_lengths[:, None] - 1  # [B, T]
    for step, logits in enumerate(head.unroll(batch.taps, batch.embeddings, num_steps)):
        shift = 1 + step  # row t is judged by the target at position t + shift
        real = begins & (rows + shift + 1 < batch.lengths[:, None])
        choice = _ahead(batch.target_ids, shift)
        learnt = real & has_draft_id[choice]
        log_probs = logits.float().log_softmax(-1)
        loss = -(_ahead(wanted, shift) * log_probs).sum(-1)
        losses.append((loss * learnt).sum() / learnt.sum().clamp(min=1))
        weights.append(decay**step)
        drafts = to_target[logits.detach().argmax(-1)]
        agreed.append(((drafts == choice) & real).sum())
        counted.append(real.sum())
        if keep_matches:
            matched.append((drafts == _ahead(batch.token_ids, shift + 1)) & real)
    shares = (weight / sum(weights) for weight in weights)
    return Measured(
        torch.stack([loss * share for loss, share in zip(losses, shares, strict=True)]).sum(),
        torch.stack(agreed).float(),
        torch.stack(counted).float(),
        torch.stack(matched, dim=-1) if keep_matches else None,
    )


def _ahead(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved left: row t holds what stood at t + by, and zeros at the end."""
    out = torch.zeros_like(x)
    out[:, : x.shape[1] - by] = x[:, by:]
    return out


def walk(
    matched: Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Decode the sequences of `matched` [B, T, K] bool by speculation.

    With greedy replies this is what an engine does at temperature 0: start at the first token of
    the reply, accept the drafts that match, take one token of the target's own, go on from there.
    Gives for each k how many verify steps had a draft k within the text, and how many accepted it.
    """
    num_drafts = matched.shape[-1]
    table = matched.long().cumprod(-1).sum(-1).tolist()  # [B, T] drafts accepted from row t
    drafted, accepted = [0] * num_drafts, [0] * num_drafts
    for row, length, prompt_length in zip(table, lengths, prompt_lengths, strict=True):
        at = prompt_length - 1
        while at + 2 < length:
            for k in range(min(num_drafts, length - at - 2)):
                drafted[k] += 1
                accepted[k] += k < row[at]
            at += row[at] + 1
    return drafted, accepted
