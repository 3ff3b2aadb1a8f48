"""Qwen2-MoE and Qwen3-MoE: the Llama family's attention with mixture-of-experts layers.

Qwen3-MoE has query and key norms and no shared expert; Qwen2-MoE has biases and a shared expert.
"""

from __future__ import annotations

from typing import Any

from ..layers import WeightFormat
from ..llama import DecoderLayer, FeedForward, LlamaModel
from ..moe import SparseMLP


def has_experts(config: Any, index: int) -> bool:
    """Whether layer `index` is a mixture of experts."""
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    return index not in dense and config.num_experts > 0 and (index + 1) % step == 0


class QwenMoeLayer(DecoderLayer):
    """A pre-norm block whose feed-forward part is dense or has experts."""

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        """As the base class; experts where the config says so."""
        if has_experts(config, index):
            return SparseMLP(config, fmt)
        return super().make_mlp(config, index, fmt)


class QwenMoeModel(LlamaModel):
    """The whole model."""

    layer_type = QwenMoeLayer
