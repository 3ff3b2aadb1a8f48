"""Drafters that read the target's hidden states: heads of EAGLE-1 or EAGLE-3, and MTP modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from .autoregressive import AutoRegressiveSpeculator
from .base import DraftInputs, SpeculatorNeeds
from .draft_head import DraftModel


class EagleModel(DraftModel, Protocol):
    """A draft head of EAGLE-1 or EAGLE-3."""

    aux_boundaries: tuple[int, ...]  # the auxiliary hidden states it reads; none in EAGLE-1


class EagleSpeculator(AutoRegressiveSpeculator):
    """Reads the final hidden states (EAGLE-1) or auxiliary hidden states (EAGLE-3)."""

    model: EagleModel

    def load_draft_model(self) -> EagleModel:
        """Load the head of `method`. It shares the target's embeddings and output head if it has
        none."""
        head: EagleModel = self.host.load_draft_model(self.config.method, self.config)
        return head

    def describe_needs(self) -> SpeculatorNeeds:
        """Auxiliary hidden states instead of the final ones if the head reads any."""
        return replace(
            super().describe_needs(),
            hidden_states=not self.model.aux_boundaries,
            aux_hidden_state_boundaries=self.model.aux_boundaries,
        )

    def select_target_hidden(self, inputs: DraftInputs) -> Tensor:
        """Auxiliary hidden states side by side, lowest layer first, or the final hidden states."""
        if not self.needs.aux_hidden_state_boundaries:
            return super().select_target_hidden(inputs)
        assert inputs.aux_hidden_states is not None
        return inputs.aux_hidden_states


class MTPSpeculator(EagleSpeculator):
    """Reads the target's hidden states after the final norm, or before it if the module wants that.

    The hidden state before the norm is the auxiliary hidden state after the last layer.
    """

    def load_draft_model(self) -> EagleModel:
        """Load the module that is stored with the target, or in its own folder."""
        model: EagleModel = self.host.load_draft_model("mtp", self.config)
        return model
