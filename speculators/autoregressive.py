"""Drafters that feed their output back: one pass over the target's rows, then one-token decodes.

This module defines the passes; the runner's `DraftGraphs` calls them in order. The pass over the
target's rows (*draft prefill*) keeps rejected rows in the batch, since leaving them out would wait
for the device; what they write is overwritten before anything reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..configs.schema import SpeculativeConfig
from ..kernels.drafts.prepare_draft import advance_draft_decode
from ..kernels.drafts.stage_drafts import stage_draft_rows
from .base import DraftHost, DraftInputs, DraftModelSpeculator, SpeculatorNeeds
from .deferred import DeferredTokens


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """One draft prefill and K - 1 draft decodes; K may differ by step, up to `num_drafts`.

    A proposal is `stage`, `first_pass`, then for each decode `advance` (if positions advance) and
    `decode`, then `store_drafts`. Every pass reads and writes only the buffers, so it can be
    recorded in a graph.
    """

    advance_draft_positions = True  # False: decodes stay at one position and write no KV (Gemma 4)
    runs_draft_prefill = True  # False: nothing runs over the target's rows (Gemma 4)
    # False: a decode makes the first draft too, and the draft prefill reads unshifted ids and no
    # hidden states (a whole model).
    first_pass_drafts = True

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        super().__init__(config, host)
        wide, narrow = self.model.input_width, self.model.feedback_width

        def zeros(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=host.dtype, device=host.device)

        self.target_hidden = zeros(host.max_num_tokens, wide)  # [T, input_width]
        self.hidden = zeros(host.max_num_reqs, narrow)  # [R, feedback_width]
        self.deferred: DeferredTokens | None = None
        if self.runs_draft_prefill:
            reads = self.first_pass_drafts
            self.deferred = DeferredTokens(host, wide, keeps_hidden=reads, shift=int(reads))
        self.needs = self.describe_needs()

    def describe_needs(self) -> SpeculatorNeeds:
        """What the runner must provide; K lookahead slots hold the drafts' KV."""
        return SpeculatorNeeds(
            num_speculative_tokens=self.num_drafts,
            num_lookahead_tokens=self.num_drafts,
            hidden_states=True,
            draft_logits=self.probabilistic,
            max_deferred_tokens=0 if self.deferred is None else self.deferred.capacity,
            kv_needs_next_token=True,
        )

    def num_decodes(self, num_drafts: int) -> int:
        """The number of decodes that `num_drafts` drafts need."""
        return max(0, num_drafts - 1) if self.first_pass_drafts else num_drafts

    def stage(self, inputs: DraftInputs) -> None:
        """Copy and shift the target's step into the buffers, padded rows included, but not its
        hidden states."""
        self._all_greedy = inputs.all_greedy
        tokens = inputs.descriptor.num_tokens
        stage_draft_rows(inputs, inputs.requests, self, inputs.num_reqs, tokens, self.max_position)

    def stage_hidden(self, inputs: DraftInputs) -> None:
        hidden = self.select_target_hidden(inputs)
        self.target_hidden[: hidden.shape[0]] = hidden

    def select_target_hidden(self, inputs: DraftInputs) -> Tensor:
        """The target's hidden states that the first pass reads, [M*, input_width]."""
        assert inputs.hidden_states is not None
        return inputs.hidden_states

    def first_pass(
        self, num_tokens: int, num_reqs: int, attention: Any, target_hidden: Tensor | None = None
    ) -> None:
        """The pass over the target's token rows; draws draft 0 of each request.

        `target_hidden` [num_tokens, input_width] is read in place of the buffer, if given.
        """
        if target_hidden is None:
            target_hidden = self.target_hidden[:num_tokens]
        for_logits = self.model.run(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.model.combine(target_hidden),
            attention,
            self.hidden[:num_reqs],
            only=self.last_token_indices[:num_reqs],
        )
        self.draw_drafts(for_logits)

    def advance(self) -> None:
        """Move every request's decode one position on."""
        advance_draft_decode(
            self.decode_positions, self.seq_lens, self.max_position, self.write_positions
        )

    def decode(self, num_reqs: int, attention: Any) -> None:
        """Run the model on each request's newest draft, and draw the next one.

        Reads and writes rows 0 .. num_reqs of the buffers.
        """
        hidden = self.hidden[:num_reqs]
        ids, positions = self.decode_ids[:num_reqs], self.decode_positions[:num_reqs]
        self.draw_drafts(self.model.run(ids, positions, hidden, attention, hidden))

    def fill_dummy(self, num_reqs: int) -> None:
        """Fill the buffers with valid rows that belong to no request, for warm-up and capture."""
        torch.arange(self.host.max_num_reqs + 1, dtype=torch.int32, out=self.query_start_loc)
        self.query_start_loc.clamp_(max=num_reqs)
        self._all_greedy = False
        self.idx_mapping.fill_(-1)
        self.decode_positions.zero_()
        self.write_positions.fill_(-1)
        self.seq_lens.zero_()
        self.seq_lens[:num_reqs] = 1
        for buffer in (self.step, self.last_token_indices, self.input_ids, self.positions):
            buffer.zero_()
