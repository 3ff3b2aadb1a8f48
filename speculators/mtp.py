"""A drafter that is DeepSeek's multi-token prediction module: one decoder block makes all K
drafts."""

from __future__ import annotations

from .autoregressive import AutoRegressiveSpeculator
from .draft_head import DraftModel


class MTPSpeculator(AutoRegressiveSpeculator):
    """Reads the target's hidden states after the final norm."""

    def load_draft_model(self) -> DraftModel:
        """Load the module that is stored after the target's last layer, or in its own folder."""
        model: DraftModel = self.host.load_draft_model("mtp", self.config)
        return model
