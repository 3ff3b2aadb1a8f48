"""Applies sampling parameters to raw logits, in place and row by row.

Each of the L rows has the parameters of its own request, and the rows that verify a request's
drafts take the earlier drafts into account. Neutral parameters leave a row unchanged, so a batch
may mix any requests. This module knows nothing about requests; nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import operation

_SHORT_SORT = 1024  # on the CPU, top-p first tries this many of the largest logits


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """Unpack bits: [L, ceil(V / 32)] int32 -> [L, V] bool; bit v is bit v % 32 of word v // 32."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts).bitwise_and_(1).bool()
    return bits.flatten(1)[:, :size]


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Forbid the tokens with bit 0. logits: [L, V]; bitmask: [L, ceil(V / 32)] int32."""
    logits.masked_fill_(~unpack_bits(bitmask, logits.shape[1]), float("-inf"))


def add_at_tokens(logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add `values` to the logits of some tokens.

    logits: [L, V]; token_ids: [L, B], -1 = unused; values: [L, B].
    """
    used = token_ids >= 0
    logits.scatter_add_(1, token_ids.clamp(min=0).long(), torch.where(used, values, 0.0))


def forbid_tokens(logits: Tensor, token_ids: Tensor, forbidden: Tensor) -> None:
    """Forbid the tokens for which `forbidden` is true.

    token_ids: [L, B], -1 = unused; forbidden: bool, broadcast to [L, B].
    """
    values = torch.where(forbidden, float("-inf"), 0.0).expand(token_ids.shape)
    add_at_tokens(logits, token_ids, values)


def previous_drafts(draft_ids: Tensor, local_pos: Tensor, max_num_drafts: int) -> Tensor:
    """The drafts before each row in the same request, nearest first: [L, K], -1 = none.

    draft_ids: [L], the draft that each row verifies; local_pos: [L] int32, the row's number within
    its request, 0 .. n_draft.
    """
    back = torch.arange(1, max_num_drafts + 1, device=draft_ids.device)  # [K]
    rows = torch.arange(draft_ids.shape[0], device=draft_ids.device)[:, None] - back
    return torch.where(back <= local_pos[:, None], draft_ids[rows.clamp(min=0)], -1)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    drafts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor | None,
    prompt_bits: Tensor | None,
) -> None:
    """Apply repetition, frequency and presence penalties for the output and the row's drafts.

    logits: [L, V]; counts: [L, V] int32, output tokens of the row's request, to which the drafts
    are added in place; drafts: [L, K], those before the row, -1 = none; presence, frequency,
    repetition: [L]; prompt_bits: [L, ceil(V / 32)] int32, since repetition also covers the prompt.
    `repetition` and `prompt_bits` are None if no row uses repetition.
    """
    counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).to(counts.dtype))
    in_output = counts > 0
    if repetition is not None and prompt_bits is not None:
        seen = unpack_bits(prompt_bits, logits.shape[1]) | in_output
        factor = repetition[:, None]
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        torch.where(seen, repeated, logits, out=logits)
    logits.addcmul_(counts, frequency[:, None], value=-1)
    logits.addcmul_(in_output, presence[:, None], value=-1)


def completed_words(tokens: Tensor, after: Tensor, first: Tensor, before: Tensor) -> Tensor:
    """Which tokens would complete a bad word, given the text before the row: [L, T] bool.

    Each row has a list of words, stored as their tokens one after another. tokens: [L, T], -1 =
    unused; after: [L, T], the number of tokens of the same word that follow; first: [L, T], the
    index in the list of the word's first token; before: [L, T], the token of the text that is
    `after` places before the row's position, unused where `after` is 0.
    """
    differs = ((after > 0) & (before != tokens)).cumsum(1)  # [L, T] up to and with each token
    until = torch.nn.functional.pad(differs, (1, 0))  # [L, T + 1] before each token
    same = differs == until.gather(1, first.clamp(min=0).long())
    return same & (after == 0)


def apply_temperature(logits: Tensor, temperature: Tensor) -> None:
    """Divide each row by its temperature, [L]; a greedy row (0) stays as it is."""
    logits.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])


def apply_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Forbid tokens with less than min_p times the largest probability. min_p: [L], 0 = off."""
    bound = logits.amax(-1) + min_p.log()
    logits.masked_fill_(logits < bound[:, None], float("-inf"))


def apply_top_k_top_p_reference(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    max_top_k: int | None,
    any_top_p: bool,
) -> None:
    """Keep the top_k most likely tokens, and of these the smallest set with mass >= top_p.

    Tokens that tie with the last one kept are kept. logits: [L, V]; top_k: [L] int64, 0 = off;
    top_p: [L], 1 = off; max_top_k: an upper bound of top_k, or None if a row does not use it;
    any_top_p: whether a row uses top_p.
    """
    vocab_size = logits.shape[1]
    width = min(max_top_k or vocab_size, vocab_size)
    if any_top_p and width > _SHORT_SORT and not logits.is_cuda:
        bound, enough = _smallest_kept(logits, top_k, top_p, _SHORT_SORT, any_top_p)
        if not enough.all():
            bound, _ = _smallest_kept(logits, top_k, top_p, width, any_top_p)
    else:
        bound, _ = _smallest_kept(logits, top_k, top_p, width, any_top_p)
    logits.masked_fill_(logits < bound[:, None], float("-inf"))


apply_top_k_top_p = operation(apply_top_k_top_p_reference, "logits", ".triton.top_k_top_p")


def _smallest_kept(
    logits: Tensor, top_k: Tensor, top_p: Tensor, width: int, any_top_p: bool
) -> tuple[Tensor, Tensor]:
    """The smallest logit to keep in each row, [L], judging by the `width` largest logits; and
    whether these were enough to tell, [L] bool."""
    vocab_size = logits.shape[1]
    if width < vocab_size:
        largest = logits.topk(width, dim=-1).values  # [L, width], descending
    else:
        largest = logits.sort(dim=-1, descending=True).values
    uses_k = (top_k > 0) & (top_k < vocab_size)
    last = (top_k.clamp(min=1, max=width) - 1)[:, None]
    kth = torch.where(uses_k, largest.gather(1, last)[:, 0], float("-inf"))
    enough = ~uses_k | (top_k <= width)
    if not any_top_p:
        return kth, enough
    kept = largest.masked_fill(largest < kth[:, None], float("-inf"))
    # Masses relative to the likeliest token. They are added in order, so that `width`, which
    # depends on other rows, changes no sum.
    mass = (kept - largest[:, :1]).exp_().cumsum(-1)
    total = mass[:, -1]
    if width < vocab_size:  # rows without top-k need the mass of the whole vocabulary
        whole = logits.log_softmax(-1).amax(-1).neg_().exp_()  # 1 / share of the likeliest
        total = torch.where(uses_k, total, whole)
    mass_before = mass.roll(1, -1)
    mass_before[:, 0] = 0.0
    num_kept = (mass_before < (top_p * total)[:, None]).sum(-1)
    smallest = kept.gather(1, (num_kept - 1).clamp(min=0)[:, None])[:, 0]
    uses_p = top_p < 1
    enough &= torch.where(uses_p, num_kept < width, True) | (width == vocab_size)
    return torch.where(uses_p, torch.maximum(smallest, kth), kth), enough
