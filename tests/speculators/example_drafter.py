"""An example of a custom drafter: one matrix that predicts the next hidden state.

From the embedding of token p + 1 and the target's hidden state of p it predicts the hidden state of
p + 1, which the target's head turns into a draft for p + 2; the prediction is fed back for the next
draft. Used with `-sc '{"method": "example_drafter:ExampleSpeculator", "model": "FOLDER"}'`, where
FOLDER contains model.safetensors and Python can import the module.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.speculators.autoregressive import AutoRegressiveSpeculator
from slipstream.speculators.base import SpeculatorNeeds
from slipstream.speculators.draft_head import DraftHead, DraftModel


class ExampleHead(DraftHead, nn.Module):
    """What `DraftHead` needs to become a `DraftModel`: two widths and two functions."""

    def __init__(self, weight: Tensor, target: Any) -> None:  # weight: [H, 2 H]
        super().__init__()
        self.register_buffer("weight", weight)
        self.target = [target]  # in a list, so that the target is no part of this module
        self.input_width = self.feedback_width = weight.shape[0]

    weight: Tensor

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Any
    ) -> Tensor:
        """input_ids, positions [M]; hidden [M, H] -> [M, H], for the logits and the next pass.
        No attention, so no KV either.

        It is recorded in a graph: no `.item()`, no shape that depends on values.
        """
        embedding = self.target[0].embed(input_ids)
        return hidden + F.silu(F.linear(torch.cat([embedding, hidden], dim=-1), self.weight))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V]."""
        logits: Tensor = self.target[0].compute_logits(hidden)
        return logits


class ExampleSpeculator(AutoRegressiveSpeculator):
    """Everything else is inherited: buffers, graphs, sampling of drafts, the loop over K."""

    def load_draft_model(self) -> DraftModel:
        """Called once, before KV memory is sized."""
        assert self.config.model is not None, "name the folder with model.safetensors"
        stored = load_file(Path(self.config.model) / "model.safetensors")
        weight = stored["weight"].to(self.host.device, self.host.dtype)
        return ExampleHead(weight, self.host.target_model)

    def describe_needs(self) -> SpeculatorNeeds:
        """The target's hidden states, but no KV: no lookahead slots, and prefix hits keep their
        last block."""
        return replace(super().describe_needs(), num_lookahead_tokens=0, kv_needs_next_token=False)
