"""DeepSeek's multi-token prediction: one extra decoder block, reused for all K drafts."""

from __future__ import annotations

from torch import nn

from .autoregressive import AutoRegressiveSpeculator


class MTPSpeculator(AutoRegressiveSpeculator):
    """Reads the target's hidden states after the final norm."""

    def load_draft_model(self) -> nn.Module:
        """The module stored behind the target's last layer, or in a folder of its own."""
        return self.host.load_draft_model("mtp", self.config)

    @property
    def model_returns_tuple(self) -> bool:
        """One tensor for both uses when the normed hidden state is fed back, as in training."""
        return self.config.mtp_feedback == "pre_norm"
