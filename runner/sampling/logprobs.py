"""Computes log probabilities of emitted tokens from the raw logits, for requests that want them.

"Raw" is vLLM's default: the model's own distribution before grammar, bias, penalties, temperature
and truncation. The numbers are therefore the same with and without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch.host_copy import StagingPool
from ..batch.step_output import TokenLogprobTensors
from .prompt_logprobs import MAX_CHUNK_BYTES, concatenate, token_logprobs


def emitted_logprobs(
    logits: Tensor,  # [L, V] raw
    sampled_token_ids: Tensor,  # [N, K + 1] int64, -1 = none
    cu_num_logits_cpu: Sequence[int],  # [N + 1]
    num_logprobs: Sequence[int | None],  # [N] alternatives wanted; None = no logprobs
    pool: StagingPool,
) -> TokenLogprobTensors | None:
    """Return rows [N * (K + 1)], row-major by (batch row, offset); zeros where not wanted.

    None if no request wants any.
    """
    wanted = [row for row, top in enumerate(num_logprobs) if top is not None]
    if not wanted:
        return None
    top = min(max(num_logprobs[row] or 0 for row in wanted), logits.shape[1])
    num_reqs, width = sampled_token_ids.shape
    sources, targets = [], []  # logits row, output row; one pair per token that may be emitted
    for row in wanted:
        for offset in range(cu_num_logits_cpu[row + 1] - cu_num_logits_cpu[row]):
            sources.append(cu_num_logits_cpu[row] + offset)
            targets.append(row * width + offset)
    source_rows, target_rows = pool.upload(np.array([sources, targets], dtype=np.int64))
    tokens = sampled_token_ids.flatten()[target_rows].clamp(min=0)
    step = max(1, MAX_CHUNK_BYTES // (4 * logits.shape[1]))
    parts = [
        token_logprobs(logits[rows], ids, top)
        for rows, ids in zip(torch.split(source_rows, step), torch.split(tokens, step), strict=True)
    ]
    columns = []
    for values in concatenate(parts).columns():
        column = values.new_zeros((num_reqs * width, *values.shape[1:]))
        columns.append(column.index_copy_(0, target_rows, values))
    return TokenLogprobTensors(*columns)
