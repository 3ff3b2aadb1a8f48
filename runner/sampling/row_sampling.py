"""Passes a batch's logits rows to the sampler in pieces of bounded memory.

A step is split between requests, so that a request's drafts are always verified together. This file
chooses no token itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ...kernels.linear.head_sample import Draws
from ..batch.input_batch import InputBatch
from ..batch.request_table import RequestTable
from ..batch.step_output import TokenLogprobTensors
from .logits_processing import SamplingRows
from .sampler import Sampler, SamplerOutput, SamplingPath, split_requests

# (hidden [L, H], vocabulary size, draws) -> the result of `sampler.Pick`
PickTokens = Callable[[Tensor, int, Draws | None], tuple[Tensor, Tensor]]
MAX_LOGITS_BYTES = 1 << 30  # float32 logits held at once


class RowSampling:
    """The sampler as the runner uses it."""

    def __init__(self, sampler: Sampler, num_speculative_tokens: int, vocab_size: int) -> None:
        self.sampler = sampler
        self._max_drafts = num_speculative_tokens
        # logits rows held at once
        self.max_rows = max(num_speculative_tokens + 1, MAX_LOGITS_BYTES // (4 * vocab_size))

    def run(
        self,
        batch: InputBatch,
        hidden_states: Tensor,  # [M*, H]
        table: RequestTable,
        grammar_bitmask: Tensor | None,  # [L, ceil(V / 32)] int32
        compute_logits: Callable[[Tensor], Tensor],
        pick_tokens: PickTokens | None = None,
    ) -> SamplerOutput:
        """Compute the logits of every logits row, and sample or verify for every request.

        Where only the tokens are needed, a model with `pick_tokens` chooses them without logits.
        """
        outputs = []
        whole = SamplingRows(
            slots=batch.slots,
            idx_mapping=batch.idx_mapping[: batch.num_reqs],
            cu_num_logits=batch.cu_num_logits,
            cu_num_logits_cpu=batch.cu_num_logits_cpu,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            expanded_local_pos=batch.expanded_local_pos,
            positions=batch.logits_positions,
            draft_ids=batch.draft_ids,
            seq_lens=batch.seq_lens[: batch.num_reqs],
            max_num_drafts=self._max_drafts,
        )
        for first, last in pairwise(split_requests(batch.cu_num_logits_cpu, self.max_rows)):
            rows = whole.requests(first, last)
            span = slice(batch.cu_num_logits_cpu[first], batch.cu_num_logits_cpu[last])
            hidden = hidden_states[batch.logits_indices[span]]
            mask = None if grammar_bitmask is None else grammar_bitmask[span]
            if pick_tokens is not None and self._path(rows, table, mask) is SamplingPath.DRAW:
                pick = partial(pick_tokens, hidden, table.sampling.vocab_size)
                outputs.append(self.sampler.draw(pick, rows, table))
                continue
            outputs.append(self.sampler.sample(compute_logits(hidden), rows, table, mask))
        return _join(outputs)

    def path(self, batch: InputBatch, table: RequestTable) -> SamplingPath:
        has_drafts = batch.num_logits > batch.num_reqs
        return self.sampler.path(table.sampling.features(batch.slots), has_drafts)

    def _path(self, rows: SamplingRows, table: RequestTable, mask: Tensor | None) -> SamplingPath:
        has_drafts = rows.cu_num_logits_cpu[-1] > len(rows.slots)
        return self.sampler.path(table.sampling.features(rows.slots), has_drafts, mask is not None)


def _join(outputs: list[SamplerOutput]) -> SamplerOutput:
    def column(name: str) -> Tensor:
        parts = [getattr(output, name) for output in outputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return SamplerOutput(
        sampled_token_ids=column("sampled_token_ids"),
        num_sampled=column("num_sampled"),
        num_rejected=column("num_rejected"),
        has_nan=column("has_nan"),
        logprobs=_join_logprobs(outputs),
    )


def _join_logprobs(outputs: list[SamplerOutput]) -> TokenLogprobTensors | None:
    """Concatenate the pieces. Missing log probabilities or alternatives are filled with zeros."""
    found = [output.logprobs for output in outputs if output.logprobs is not None]
    if len(outputs) == 1 or not found:
        return outputs[0].logprobs
    top = max(logprobs.top_ids.shape[1] for logprobs in found)
    columns: list[list[Tensor]] = [[] for _ in found[0].columns()]
    for output in outputs:
        rows = output.sampled_token_ids.numel()
        for index, column in enumerate(columns):
            like = found[0].columns()[index]
            full = like.new_zeros((rows, top) if like.dim() == 2 else (rows,))
            if output.logprobs is not None:
                part = output.logprobs.columns()[index]
                (full[:, : part.shape[1]] if part.dim() == 2 else full).copy_(part)
            column.append(full)
    return TokenLogprobTensors(*(torch.cat(column) for column in columns))
