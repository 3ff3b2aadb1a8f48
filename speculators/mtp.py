"""A drafter that is a multi-token prediction module: one decoder block makes all K drafts."""

from __future__ import annotations

from .eagle import EagleModel, EagleSpeculator


class MTPSpeculator(EagleSpeculator):
    """Reads the target's hidden states after the final norm, or before it if the module wants that.

    The hidden state before the norm is the auxiliary hidden state after the last layer.
    """

    def load_draft_model(self) -> EagleModel:
        """Load the module that is stored with the target, or in its own folder."""
        model: EagleModel = self.host.load_draft_model("mtp", self.config)
        return model
