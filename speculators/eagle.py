"""EAGLE-1 and EAGLE-3: a small head that reads the target's hidden states."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .autoregressive import AutoRegressiveSpeculator
from .base import DraftInputs, SpeculatorNeeds


class EagleSpeculator(AutoRegressiveSpeculator):
    """Reads the final hidden states (EAGLE-1) or taps of the residual stream (EAGLE-3)."""

    def load_draft_model(self) -> nn.Module:
        """The head of `method`; it shares embeddings and output head where it has none."""
        return self.host.load_draft_model(self.config.method, self.config)

    @property
    def model_returns_tuple(self) -> bool:
        """EAGLE-3 norms for the logits and feeds back the unnormed stream."""
        return bool(self.model.returns_tuple)

    def describe_needs(self) -> SpeculatorNeeds:
        """Adds the taps."""
        taps: tuple[int, ...] = self.model.aux_boundaries
        return replace(
            super().describe_needs(), hidden_states=not taps, aux_hidden_state_boundaries=taps
        )

    def select_target_hidden(self, inputs: DraftInputs) -> Tensor:
        """Taps side by side, low to high, or the final hidden states."""
        if not self.needs.aux_hidden_state_boundaries:
            return super().select_target_hidden(inputs)
        assert inputs.aux_hidden_states is not None
        return inputs.aux_hidden_states
