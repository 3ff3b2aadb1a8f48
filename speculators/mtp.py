"""DeepSeek's multi-token prediction: one extra decoder block, reused for all K drafts."""

from __future__ import annotations

from .autoregressive import AutoRegressiveSpeculator
from .draft_head import DraftModel


class MTPSpeculator(AutoRegressiveSpeculator):
    """Reads the target's hidden states after the final norm."""

    def load_draft_model(self) -> DraftModel:
        """The module stored after the target's last layer, or in a folder of its own."""
        model: DraftModel = self.host.load_draft_model("mtp", self.config)
        return model
