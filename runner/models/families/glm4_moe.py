"""GLM-4.5 and 4.6: attention with a partly rotated head, and experts that a sigmoid router chooses.

The experts are DeepSeek V3's, and so is the module for multi-token prediction after the last layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ....kernels.linear.experts import Routing
from ....kernels.linear.linear import Norm
from ..base import is_after_layers
from ..layers import WeightFormat
from ..llama import MLP, DecoderLayer, FeedForward, LlamaModel
from ..moe import Experts, Router


class GlmMoE(nn.Module):
    """A feed-forward layer of routed experts plus shared experts."""

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, size, count = (
            config.hidden_size, config.moe_intermediate_size, config.n_routed_experts,
        )  # fmt: skip
        routing = Routing(
            config.num_experts_per_tok,
            scoring="sigmoid",
            num_groups=config.n_group or 1,
            top_groups=config.topk_group or 1,
            group_score="top2",
            renormalise=bool(config.norm_topk_prob),
            scale=float(config.routed_scaling_factor),
        )
        self.gate = Router(hidden, count, routing, fmt, correction=True)
        self.experts = Experts(count, hidden, size, fmt)
        self.experts.expert_share = routing.top_k / count
        shared = config.n_shared_experts or 0
        self.shared_experts = (
            MLP(hidden, size * shared, fmt, bias=False, sums=False) if shared else None
        )

    def parts(
        self, hidden: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """hidden: [M, H] -> [M, H], or partial sums [S, M, H], which the next norm adds up.

        `norms` and `adds` say that it gets neither norm nor residual.
        """
        assert norm is None and residual is None
        shared = self.shared_experts
        out = self.experts.parts(hidden, *self.gate.forward(hidden), spare=int(shared is not None))
        if shared is None:
            return self.experts.sum(out)
        own = shared.forward(hidden)
        if out.dim() == 2:
            return self.experts.sum(out + own)
        out[-1].copy_(own)
        return out

    def norms(self, num_rows: int) -> bool:
        """As `MLP.norms`: never, since router and experts read the same normed rows."""
        return False

    def adds(self, num_rows: int) -> bool:
        """As `MLP.adds`: never."""
        return False


class GlmLayer(DecoderLayer):
    """A pre-norm block. The first ones are dense."""

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        """As the base class; experts after the dense layers."""
        if index >= (config.first_k_dense_replace or 0):
            return GlmMoE(config, fmt)
        return super().make_mlp(config, index, fmt)


class GlmMoeModel(LlamaModel):
    """The target model. It skips the checkpoint's multi-token-prediction layers, for the
    drafter."""

    layer_type = GlmLayer

    def checkpoint_name(self, name: str) -> str | None:
        if is_after_layers(name, len(self.blocks)):
            return None
        return super().checkpoint_name(name)
