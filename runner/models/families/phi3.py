"""Phi-3 and Phi-4: the Llama family with projections that are stored fused."""

from __future__ import annotations

from typing import Any

from ..layers import WeightFormat
from ..llama import MLP, Attention, DecoderLayer, FeedForward, LlamaModel
from ..sharded import stacked_linear


class PhiLayer(DecoderLayer):
    def make_attention(
        self, config: Any, index: int, layer_id: int, fmt: WeightFormat
    ) -> Attention:
        """As the base class, with one stored matrix for queries, keys and values."""
        attention = Attention(config, index, layer_id, fmt)
        heads = config.num_attention_heads
        counts = (heads, *[config.num_key_value_heads or heads] * 2)
        sections = [(count * attention.head_dim, count) for count in counts]
        attention.qkv_proj = stacked_linear(config.hidden_size, sections, fmt, "qkv", "heads")
        return attention

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        mlp = MLP(config.hidden_size, config.intermediate_size, fmt, bias=False)
        what, size = "intermediate features", config.intermediate_size
        sections = [(size, size)] * 2
        mlp.gate_up_proj = stacked_linear(config.hidden_size, sections, fmt, "gate_up", what)
        return mlp


class PhiModel(LlamaModel):
    layer_type = PhiLayer
