"""Computes log probabilities of emitted and prompt tokens, for requests that want them.

"Raw" is vLLM's default: the model's own distribution before grammar, bias, penalties, temperature
and truncation. The numbers are therefore the same with and without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.log_probs import likeliest, log_probs
from ..batch.host_copy import StagingPool
from ..batch.input_batch import InputBatch
from ..batch.request_table import RequestTable
from ..batch.step_output import PromptChunk, TokenLogprobTensors
from ..scheduling.plan import ScheduledRow, StepPlan


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


MAX_CHUNK_BYTES = 64 << 20  # float32 logits held at once


def token_logprobs(
    logits: Tensor,  # [P, V]
    token_ids: Tensor,  # [P] int64
    top: int,
) -> TokenLogprobTensors:
    """Compute the log probability and rank of each token, and its `top` likeliest alternatives."""
    logprobs = log_probs(logits)
    chosen = logprobs.gather(1, token_ids[:, None])  # [P, 1]
    ranks = (logprobs > chosen).sum(1) + 1
    top_logprobs, top_ids = likeliest(logprobs, min(top, logits.shape[1]))
    return TokenLogprobTensors(token_ids, chosen[:, 0], ranks, top_ids, top_logprobs)


def concatenate(parts: list[TokenLogprobTensors]) -> TokenLogprobTensors:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns() for part in parts), strict=True)
    return TokenLogprobTensors(*(torch.cat(column) for column in columns))


@dataclass(frozen=True)
class _Wish:
    prompt_len: int
    top: int


class PromptLogprobs:
    """Computes prompt log probabilities chunk by chunk, for the slots that want them."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self._compute_logits = compute_logits
        self._chunk_rows = max(1, MAX_CHUNK_BYTES // (4 * vocab_size))
        self._wishes: dict[int, _Wish] = {}  # by slot

    def update(self, plan: StepPlan) -> None:
        """Note the slots that `plan` frees and fills."""
        for slot in plan.freed_slots:
            self._wishes.pop(slot, None)
        for new in plan.new_requests:
            self._wishes.pop(new.slot, None)
            if new.sampling.prompt_logprobs is not None:
                self._wishes[new.slot] = _Wish(new.prompt_len, new.sampling.prompt_logprobs)

    def compute(
        self,
        rows: list[ScheduledRow],
        batch: InputBatch,
        hidden_states: Tensor,  # [M*, H]
        table: RequestTable,
    ) -> list[PromptChunk]:
        """Compute one entry per row that ran prompt positions with a prompt token after them.

        Must run before the drafter, because the hidden states may be in a graph's memory. During
        prefill the host's `num_computed_tokens` is exact.
        """
        chunks: list[PromptChunk] = []
        if not self._wishes:
            return chunks
        query_starts = batch.query_start_loc_cpu.tolist()
        for index, row in enumerate(rows):
            wish = self._wishes.get(row.slot)
            if wish is None:
                continue
            start = row.num_computed_tokens
            count = min(start + row.num_tokens, wish.prompt_len - 1) - start
            if count > 0:
                targets = table.all_token_ids[row.slot, start + 1 : start + 1 + count].long()
                first = query_starts[index]
                tensors = self._rows(hidden_states[first : first + count], targets, wish.top)
                chunks.append(PromptChunk(index, wish.top, tensors))
        return chunks

    def _rows(self, hidden: Tensor, targets: Tensor, top: int) -> TokenLogprobTensors:
        parts = [
            token_logprobs(self._compute_logits(part), ids, top)
            for part, ids in zip(
                torch.split(hidden, self._chunk_rows),
                torch.split(targets, self._chunk_rows),
                strict=True,
            )
        ]
        return concatenate(parts)
