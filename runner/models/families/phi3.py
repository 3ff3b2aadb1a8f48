"""Phi-3 and Phi-4: the Llama family with projections that are stored fused."""

from __future__ import annotations

from typing import Any

from ..layers import Linear, WeightFormat
from ..llama import MLP, Attention, DecoderLayer, FeedForward, LlamaModel


class PhiLayer(DecoderLayer):
    """A pre-norm block."""

    def make_attention(
        self, config: Any, index: int, layer_id: int, fmt: WeightFormat
    ) -> Attention:
        """As the base class, with one stored matrix for queries, keys and values."""
        attention = Attention(config, index, layer_id, fmt)
        outputs = attention.qkv_proj.out_features
        attention.qkv_proj = Linear(config.hidden_size, outputs, fmt, False, "qkv")
        return attention

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        """As the base class, with one stored matrix for gate and up."""
        mlp = MLP(config.hidden_size, config.intermediate_size, fmt, bias=False)
        outputs = 2 * config.intermediate_size
        mlp.gate_up_proj = Linear(config.hidden_size, outputs, fmt, False, "gate_up")
        return mlp


class PhiModel(LlamaModel):
    """The whole model."""

    layer_type = PhiLayer
