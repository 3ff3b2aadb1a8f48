"""A drafter that is Gemma 4's assistant: K decodes at one position, over the target's own KV.

It writes no KV, so position, length and attention metadata are the same for all K drafts; only the
newest token and the fed-back hidden state change.
"""

from __future__ import annotations

from dataclasses import replace

from .autoregressive import AutoRegressiveSpeculator
from .base import DraftInputs, SpeculatorNeeds
from .draft_head import DraftModel


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Decodes from each request's last valid row: position P = seq_len - rejected - 1, over the KV
    of positions 0 .. P."""

    advance_draft_positions = runs_draft_prefill = first_pass_drafts = False

    def load_draft_model(self) -> DraftModel:
        """Load the assistant. It uses the target's embeddings and an output head of its own."""
        model: DraftModel = self.host.load_draft_model("gemma4_mtp", self.config)
        return model

    def describe_needs(self) -> SpeculatorNeeds:
        """Without KV of its own: no lookahead slots, and a prefix hit keeps its last block."""
        return replace(super().describe_needs(), num_lookahead_tokens=0, kv_needs_next_token=False)

    def stage(self, inputs: DraftInputs) -> None:
        """Also prepares the first decode: each request's newest token and last hidden state."""
        super().stage(inputs)
        assert inputs.hidden_states is not None
        rows = inputs.num_reqs
        last = self.last_token_indices[:rows]
        # The shifted id of the last valid row is the newest token.
        self.decode_ids[:rows] = self.input_ids[last]
        self.decode_ids[rows:] = 0
        self.hidden[:rows] = inputs.hidden_states[last]
        self.hidden[rows:] = 0
        if self.config.position_offset:
            self.decode_positions[:rows] += self.config.position_offset
            self.decode_positions.clamp_(max=self.max_position - 1)
