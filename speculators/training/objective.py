"""The training objective and its measures: loss by draft, agreement, acceptance length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .head import TrainingHead


@dataclass(frozen=True)
class Batch:
    """A batch of sequences, padded on the right, with the target's results for them."""

    taps: Tensor  # [B, T, taps * H]
    embeddings: Tensor  # [B, T, H]
    draft_logits: Tensor  # [B, T, D] the target's logits of the draft vocabulary
    target_ids: Tensor  # [B, T] int64, the target's likeliest token after each position
    token_ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    prompt_lengths: Tensor  # [B] int64


@dataclass(frozen=True)
class Measured:
    """The results of a pass over a batch: the loss, with its gradient, and counts on the device."""

    loss: Tensor  # scalar
    agreed: Tensor  # [K] float, number of chains in which draft k is the target's choice
    counted: Tensor  # [K] float, number of chains that have a draft k
    matched: Tensor | None = None  # [B, T, K] bool: draft k from row t equals the reply's token


def measure(
    head: TrainingHead,
    batch: Batch,
    to_target: Tensor,  # [D] int64, draft id -> target id
    has_draft_id: Tensor,  # [V] bool
    num_steps: int,  # K
    decay: float,  # weight of draft k in the loss: decay ** k
    keep_matches: bool = False,
) -> Measured:
    """Compute the loss: soft cross-entropy against the target over the draft vocabulary.

    It is averaged per draft and weighted by `decay`. Only chains count that start in the reply, and
    in the loss only those for which the target's choice has a draft id. In the agreement, a choice
    without a draft id counts as a miss.
    """
    wanted = batch.draft_logits.float().softmax(-1)  # [B, T, D]
    losses, weights, agreed, counted, matched = [], [], [], [], []
    rows = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    begins = rows >= batch.prompt_lengths[:, None] - 1  # [B, T]
    for step, logits in enumerate(head.unroll(batch.taps, batch.embeddings, num_steps)):
        shift = 1 + step  # the target judges row t at position t + shift
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
    """Shift x [B, T, ...] left by `by`: row t gets the value of row t + by, or zeros at the end."""
    out = torch.zeros_like(x)
    out[:, : x.shape[1] - by] = x[:, by:]
    return out


def walk(
    matched: Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Simulate speculative decoding of the sequences of `matched`, [B, T, K] bool.

    For greedy replies this is what an engine does at temperature 0: start at the first token of
    the reply, accept the drafts that match, take one token from the target, and continue there.
    Returns two lists: for each k, how many verify steps had a draft k within the text, and how many
    accepted it.
    """
    num_drafts = matched.shape[-1]
    table = matched.long().cumprod(-1).sum(-1).tolist()  # [B, T] number accepted from row t
    drafted, accepted = [0] * num_drafts, [0] * num_drafts
    for row, length, prompt_length in zip(table, lengths, prompt_lengths, strict=True):
        at = prompt_length - 1
        while at + 2 < length:
            for k in range(min(num_drafts, length - at - 2)):
                drafted[k] += 1
                accepted[k] += k < row[at]
            at += row[at] + 1
    return drafted, accepted
