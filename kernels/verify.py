"""The steps of draft verification over ragged logits rows; `speculators.verification` joins them.

Row r of L belongs to one request; a request's rows follow one another, `cu_num_logits` gives the
bounds, and `draft_ids[r]` is the draft that row r judges (-1 = none: always rejected). A drafter's
distribution q is the softmax of its stored logits, which already hold its temperature; without
stored logits a draft was an argmax and q is one-hot. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device import use_triton


def accept_drafts(
    logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    slots: Tensor,
    local_pos: Tensor,
    log_u: Tensor,
) -> Tensor:
    """Accept row r's draft d iff log p(d) > log u + log q(d); [L] bool.

    logits: [L, V] float32, processed; draft_ids: [L] int64; draft_logits: [R, K, Vd] float32 by
    slot, or None for one-hot q; slots, local_pos: [L] int32, where q of row r is kept;
    log_u: [L] float32 < 0.
    """
    if use_triton(logits):
        from .triton.verify import accept_drafts as accept_drafts_triton

        accepted: Tensor = accept_drafts_triton(
            logits, draft_ids, draft_logits, slots, local_pos, log_u
        )
        return accepted
    return accept_drafts_reference(logits, draft_ids, draft_logits, slots, local_pos, log_u)


def accept_drafts_reference(
    logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    slots: Tensor,
    local_pos: Tensor,
    log_u: Tensor,
) -> Tensor:
    """The plain version of `accept_drafts`."""
    drafts = draft_ids.clamp(min=0)[:, None]  # [L, 1]
    log_p = logits.gather(1, drafts)[:, 0] - logits.logsumexp(-1)
    bound = log_u
    if draft_logits is not None:
        column = local_pos.clamp(max=draft_logits.shape[1] - 1)  # the bonus row has no q
        log_q = draft_logits[slots, column].log_softmax(-1)  # [L, Vd]
        known = drafts < log_q.shape[1]
        bound = log_u + torch.where(
            known, log_q.gather(1, drafts.clamp(max=log_q.shape[1] - 1)), float("-inf")
        ).squeeze(1)
    return (log_p > bound) & (draft_ids >= 0)


def count_accepted(accepted: Tensor, cu_num_logits: Tensor, local_pos: Tensor) -> Tensor:
    """How many leading rows of each request are accepted; its last row never is. [N] int64.

    accepted: [L] bool; cu_num_logits: [N + 1] int32; local_pos: [L] int32.
    """
    num_rows = accepted.shape[0]
    last = (cu_num_logits[1:] - 1).long()  # [N] batch row -> its last logits row
    rejected = ~accepted
    rejected[last] = True
    # First rejected row at or after each row; the answer for a request is at its first row.
    rows = torch.arange(num_rows, device=accepted.device)
    at = torch.where(rejected, rows, num_rows)
    first = at.flip(0).cummin(0).values.flip(0)[cu_num_logits[:-1].long()]
    return local_pos[first].long()


def residual_logits(
    logits: Tensor,
    rows: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    slots: Tensor,
    local_pos: Tensor,
) -> Tensor:
    """Log of what is left to draw from at each request's last row; unnormalised, [N, V].

    Where the row rejected a draft: log max(p - q, 0), or p without the draft for one-hot q; p
    itself where there was no draft, or where rounding leaves nothing. rows: [N] int64 request ->
    logits row; the other shapes as in `accept_drafts`.
    """
    if use_triton(logits):
        from .triton.verify import residual_logits as residual_logits_triton

        residual: Tensor = residual_logits_triton(
            logits, rows, draft_ids, draft_logits, slots, local_pos
        )
        return residual
    return residual_logits_reference(logits, rows, draft_ids, draft_logits, slots, local_pos)


def residual_logits_reference(
    logits: Tensor,
    rows: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    slots: Tensor,
    local_pos: Tensor,
) -> Tensor:
    """The plain version of `residual_logits`."""
    target = logits[rows]  # [N, V]
    drafts = draft_ids[rows]  # [N]
    if draft_logits is None:
        minus_draft = torch.where(drafts >= 0, float("-inf"), 0.0)[:, None]
        residual = target.scatter_add(1, drafts.clamp(min=0)[:, None], minus_draft)
    else:
        column = local_pos[rows].clamp(max=draft_logits.shape[1] - 1)
        log_q = draft_logits[slots[rows], column].log_softmax(-1)
        missing = target.shape[1] - log_q.shape[1]
        log_q = torch.nn.functional.pad(log_q, (0, missing), value=float("-inf"))
        log_p = target.log_softmax(-1)
        # log(p - q) = log p + log(1 - q / p), without the cancellation of p - q
        difference = log_p + torch.log1p(-torch.exp(log_q - log_p))
        residual = torch.where(log_p > log_q, difference, float("-inf"))
    use_residual = (drafts >= 0) & (residual.amax(-1) > float("-inf"))
    return torch.where(use_residual[:, None], residual, target)


def emit_tokens(
    draft_ids: Tensor,
    tokens: Tensor,
    num_accepted: Tensor,
    cu_num_logits: Tensor,
    width: int,
) -> Tensor:
    """Accepted drafts, then the new token, then -1; [N, width] int64.

    draft_ids: [L]; tokens, num_accepted: [N] int64; cu_num_logits: [N + 1] int32; width: K + 1.
    """
    columns = torch.arange(width, device=tokens.device)
    rows = cu_num_logits[:-1, None].long() + columns  # [N, width] -> logits row
    drafts = draft_ids[rows.clamp(max=draft_ids.shape[0] - 1)]
    count = num_accepted[:, None]
    emitted = torch.where(columns < count, drafts, -1)
    return torch.where(columns == count, tokens[:, None], emitted)
