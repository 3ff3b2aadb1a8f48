"""Ends a sampling step: finds the number of tokens of each request, and which requests failed.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..operation import operation


class LogitsRows(Protocol):
    """Which of the L logits rows belong to each of N requests; a request's rows are consecutive."""

    @property
    def cu_num_logits(self) -> Tensor: ...  # [N + 1] int32, batch row -> first logits row
    @property
    def idx_mapping(self) -> Tensor: ...  # [N] int32, batch row -> slot; -1 = padded, at the end
    @property
    def seq_lens(self) -> Tensor: ...  # [N] int32, including this step's tokens


def finish_samples_reference(
    emitted: Tensor,
    num_accepted: Tensor,
    largest_raw: Tensor,
    largest: Tensor | None,
    rows: LogitsRows,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return num_sampled [N] int32, num_rejected [N] int32 and is_bad [N] bool; clear rows of
    `emitted` that emit nothing.

    Requests still in prefill and padded rows emit nothing; their row of `emitted` becomes -1. A
    request is bad if a logits row that emits contains NaN or an infinity, or allows no token.
    emitted: [N, K + 1] int64, changed in place; num_accepted: [N] int64, accepted drafts;
    largest_raw: [L] float, the largest raw logit of each row; largest: [L], the same after
    processing, or None if processing forbids no token; prefill_len: [R] int32 by slot.
    """
    slots, cu_num_logits = rows.idx_mapping, rows.cu_num_logits
    samples = (rows.seq_lens >= prefill_len[slots]) & (slots >= 0)  # [N]
    num_logits = cu_num_logits[1:] - cu_num_logits[:-1]
    num_sampled = torch.where(samples, num_accepted + 1, 0).int()
    num_rejected = torch.where(samples, num_logits - num_sampled, 0).int()
    emitted.masked_fill_(~samples[:, None], -1)

    bad = ~largest_raw.isfinite()  # [L]; NaN wins every maximum
    if largest is not None:
        bad |= largest == float("-inf")
    num_rows, num_reqs = bad.shape[0], num_accepted.shape[0]
    if num_rows > num_reqs:
        logits_rows = torch.arange(num_rows, device=bad.device, dtype=torch.int32)
        batch_rows = torch.searchsorted(cu_num_logits[1:], logits_rows, right=True)  # [L]
        batch_rows.clamp_(max=num_reqs - 1)  # padded logits rows belong to a padded request
        emits = logits_rows - cu_num_logits[batch_rows] <= num_accepted[batch_rows]
        of_request = torch.zeros_like(num_accepted)
        bad = of_request.index_add_(0, batch_rows, (bad & emits).long()) > 0
    return num_sampled, num_rejected, bad & samples


finish_samples = operation(finish_samples_reference, "emitted", ".triton.finish_samples")
