"""GLM-4.5 and 4.6: attention with a partly rotated head, and experts that a sigmoid router chooses.

The experts are DeepSeek V3's, and so is the module for multi-token prediction after the last layer.
"""

from __future__ import annotations

from typing import Any

from ....kernels.linear.experts import Routing
from ..base import is_after_layers
from ..deepseek import SharedMoE
from ..layers import WeightFormat
from ..llama import DecoderLayer, FeedForward, LlamaModel


def _routing(config: Any) -> Routing:
    """The routing rule of a config."""
    return Routing(
        config.num_experts_per_tok,
        scoring="sigmoid",
        num_groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        group_score="top2",
        renormalise=bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
    )


class GlmLayer(DecoderLayer):
    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        if index >= (config.first_k_dense_replace or 0):
            return SharedMoE(config, _routing(config), fmt, correction=True)
        return super().make_mlp(config, index, fmt)


class GlmMoeModel(LlamaModel):
    """The target model. It skips the checkpoint's multi-token-prediction layers, for the
    drafter."""

    layer_type = GlmLayer

    def checkpoint_name(self, name: str) -> str | None:
        if is_after_layers(name, len(self.blocks)):
            return None
        return super().checkpoint_name(name)
