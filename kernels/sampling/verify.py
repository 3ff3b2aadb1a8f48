"""Rejection sampling of drafts over ragged logits rows: the output has the target's distribution.

The rows of a request are consecutive, bounded by `cu_num_logits`, and row r verifies the draft
`draft_ids[r]` (-1 = none, which is always rejected). The drafter's distribution q is the softmax of
its stored logits, which are already divided by the temperature. Without stored logits the draft was
the argmax, and q is one-hot. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..operation import operation
from .sample import ACCEPT, RECOVERY, TARGET, gumbel_sample_reference, uniform
from .verify_rows import VerifyRows

__all__ = [
    "VerifyRows",
    "emit_by_chance",
    "emit_matching",
    "rejection_sample",
]


def rejection_sample_reference(rows: VerifyRows) -> tuple[Tensor, Tensor]:
    """Accept each draft with probability min(1, p / q); at the first rejection, draw from
    max(p - q, 0), normalised.

    Returns the emitted tokens, [N, K + 1] int64 with -1 after the last, and the number of accepted
    drafts, [N] int64. A greedy request accepts a draft if it is the argmax, and emits the argmax.
    A seeded request accepts by its `drawn` tokens, as in `emit_matching`.
    Source: Leviathan et al. 2023, Chen et al. 2023.
    """
    rows = _scaled(rows)
    log_z = rows.logits.logsumexp(-1, keepdim=True)  # [L, 1], log p = logits - log_z
    log_q = draft_log_probs(rows)  # [L, V], None = one-hot
    drafts = rows.draft_ids.clamp(min=0)[:, None]  # [L, 1]

    log_u = uniform(rows.seeds, rows.positions, ACCEPT)[:, None].log()
    log_q_of_draft = 0.0 if log_q is None else log_q.gather(1, drafts)
    accepted = (rows.logits.gather(1, drafts) - log_z > log_u + log_q_of_draft)[:, 0]
    if rows.any_greedy:
        accepted = torch.where(rows.greedy, rows.logits.argmax(-1) == rows.draft_ids, accepted)
    accepted &= rows.draft_ids >= 0
    num_accepted = count_accepted(accepted, rows.cu_num_logits, rows.local_pos)

    last = rows.cu_num_logits[:-1].long() + num_accepted  # [N] batch row -> its last emitting row
    rejected = rows.draft_ids[last] >= 0  # [N]; otherwise the last row, which has no draft
    use_residual = rejected & ~rows.greedy[last]
    log_p = rows.logits[last].sub_(log_z[last])  # [N, V]
    left = residual(log_p, None if log_q is None else log_q[last], drafts[last])
    is_empty = left.amax(-1) == float("-inf")  # because of rounding: use p itself
    left = torch.where((use_residual & ~is_empty)[:, None], left, log_p)
    # The noise of a recovered token must differ from the drafts' and the acceptance's.
    salt = torch.where(rejected, RECOVERY, TARGET)
    tokens = gumbel_sample_reference(
        left, rows.seeds[last], rows.positions[last], salt, rows.greedy[last]
    )
    emitted = emit_tokens(rows, tokens, num_accepted)
    if rows.seeded is None:
        return emitted, num_accepted
    assert rows.drawn is not None
    own, num_own = emit_matching_reference(rows, rows.drawn)
    seeded = rows.seeded[rows.slots[rows.cu_num_logits[:-1].long()].long()] != 0  # [N]
    emitted = torch.where(seeded[:, None], own, emitted)
    return emitted, torch.where(seeded, num_own, num_accepted)


rejection_sample = operation(rejection_sample_reference, "rows.logits", ".triton.verify")


def _scaled(rows: VerifyRows) -> VerifyRows:
    """The same rows, with their logits divided by the temperature."""
    if rows.temperature is None:
        return rows
    heat = torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    return replace(rows, logits=rows.logits.float() / heat, temperature=None)


def emit_matching_reference(rows: VerifyRows, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts while they equal the target's drawn tokens, then emit the next drawn token.

    drawn: [L] int64. Returns the emitted tokens [N, K + 1] int64 and the number of accepted drafts
    [N] int64.
    """
    if rows.has_drafts:
        accepted = drawn == rows.draft_ids
        num_accepted = count_accepted(accepted, rows.cu_num_logits, rows.local_pos)
    else:
        num_accepted = torch.zeros_like(drawn)
    tokens = drawn[rows.cu_num_logits[:-1] + num_accepted]
    return emit_tokens(rows, tokens, num_accepted), num_accepted


emit_matching = operation(emit_matching_reference, "drawn", ".triton.emit_drawn")


def emit_by_chance_reference(
    rows: VerifyRows, drawn: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft j with probability rates[j], whatever token it is; then emit the drawn token.

    This simulates a drafter of known acceptance. drawn: [L] int64; rates: [K] float32. Returns the
    same as `emit_matching`.
    """
    u = uniform(rows.seeds, rows.positions, ACCEPT)
    column = rows.local_pos.clamp(max=rates.shape[0] - 1)
    accepted = (u < rates[column]) & (rows.draft_ids >= 0)
    num_accepted = count_accepted(accepted, rows.cu_num_logits, rows.local_pos)
    tokens = drawn[rows.cu_num_logits[:-1] + num_accepted]
    return emit_tokens(rows, tokens, num_accepted), num_accepted


emit_by_chance = operation(emit_by_chance_reference, "drawn", ".triton.emit_drawn")


def draft_log_probs(rows: VerifyRows) -> Tensor | None:
    """The drafter's log probabilities over the target's vocabulary, [L, V]; None for one-hot q."""
    if rows.draft_logits is None:
        return None
    column = rows.local_pos.clamp(max=rows.draft_logits.shape[1] - 1)  # the last row has no q
    log_q = rows.draft_logits[rows.slots, column].log_softmax(-1)
    missing = rows.logits.shape[1] - log_q.shape[1]
    return torch.nn.functional.pad(log_q, (0, missing), value=float("-inf"))


def residual(log_p: Tensor, log_q: Tensor | None, drafts: Tensor) -> Tensor:
    """Compute log max(p - q, 0), unnormalised: [N, V].

    log_p: [N, V]; log_q: [N, V], or None if q is one-hot at `drafts`, [N, 1].
    """
    if log_q is None:
        return log_p.scatter(1, drafts, float("-inf"))
    # log(p - q) = log p + log(1 - q / p) avoids the cancellation in p - q
    difference = log_p + torch.log1p(-torch.exp(log_q - log_p))
    return torch.where(log_p > log_q, difference, float("-inf"))


def count_accepted(accepted: Tensor, cu_num_logits: Tensor, local_pos: Tensor) -> Tensor:
    """Count the leading accepted rows of each request, [N] int64; its last row never counts.

    accepted: [L] bool; cu_num_logits: [N + 1] int32; local_pos: [L] int32.
    """
    num_rows = accepted.shape[0]
    rejected = ~accepted
    rejected.index_fill_(0, cu_num_logits[1:].long() - 1, True)  # an assignment would synchronise
    # The first rejected row at or after each row; a request's result is at its first row.
    rows = torch.arange(num_rows, device=accepted.device)
    at = torch.where(rejected, rows, num_rows)
    first = at.flip(0).cummin(0).values.flip(0)[cu_num_logits[:-1].long()]
    return local_pos[first].long()


def emit_tokens(rows: VerifyRows, tokens: Tensor, num_accepted: Tensor) -> Tensor:
    """Join each request's accepted drafts, its new token and -1 for the rest: [N, K + 1].

    tokens, num_accepted: [N] int64.
    """
    columns = torch.arange(rows.width, device=tokens.device)
    at = rows.cu_num_logits[:-1, None].long() + columns  # [N, K + 1] -> logits row
    drafts = rows.draft_ids[at.clamp(max=rows.draft_ids.shape[0] - 1)]
    count = num_accepted[:, None]
    emitted = torch.where(columns < count, drafts, -1)
    return torch.where(columns == count, tokens[:, None], emitted)
