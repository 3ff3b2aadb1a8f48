"""Qwen2-MoE and Qwen3-MoE: the Llama family's attention with mixture-of-experts layers.

Qwen3-MoE has query and key norms and no shared expert; Qwen2-MoE has biases and a shared expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.linear.activation import gated_rows
from ....kernels.linear.experts import Routing
from ..layers import Linear, WeightFormat
from ..llama import MLP, DecoderLayer, FeedForward, LlamaModel
from ..moe import Chosen, Experts, RoutedMLP, Router


def has_experts(config: Any, index: int) -> bool:
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", None) or 1
    return index not in dense and config.num_experts > 0 and (index + 1) % step == 0


class SparseMLP(RoutedMLP):
    """A feed-forward layer of routed experts and, if the config has one, a shared expert.

    The shared expert's output is multiplied by the sigmoid of a gate. Config names are those of
    Qwen2-MoE, Qwen3-MoE, Qwen3-Next and Qwen3.5.
    """

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_intermediate_size
        renormalise = bool(getattr(config, "norm_topk_prob", True))  # Qwen3.5 always does
        routing = Routing(config.num_experts_per_tok, renormalise=renormalise)
        self.gate = Router(hidden, config.num_experts, routing, fmt)
        self.experts = Experts(config.num_experts, hidden, size, fmt)
        self.experts.expert_share = routing.top_k / config.num_experts
        shared = getattr(config, "shared_expert_intermediate_size", 0)
        self.has_shared = bool(shared)
        if shared:
            self.shared_expert = MLP(hidden, shared, fmt, bias=False, sums=False)
            self.shared_expert_gate = Linear(hidden, 1, fmt)

    @property
    def scorer(self) -> Router:
        return self.gate

    def routed(
        self, x: Tensor, stream: Tensor, chosen: Chosen, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        experts = self.experts
        adds = fuses and experts.adds(x.shape[0])
        if not self.has_shared:
            if adds:
                return experts.add(x, stream, *chosen), None
            return experts.sum(experts.parts(x, *chosen)), stream
        gate = self.shared_expert_gate.weight
        if adds and gate is not None:
            total = torch.empty_like(stream)
            gated_rows(x, gate, self.shared_expert.parts(x), total, stream)
            return experts.add(x, total, *chosen), None
        out = experts.parts(x, *chosen, spare=1)
        if gate is not None and out.dim() == 3:
            gated_rows(x, gate, self.shared_expert.parts(x), out[-1])
            return out, stream
        share = torch.sigmoid(self.shared_expert_gate.forward(x))
        shared = self.shared_expert.forward(x)
        if out.dim() == 2:
            return experts.sum(torch.addcmul(out, share, shared)), stream
        torch.mul(shared, share, out=out[-1])
        return out, stream


class QwenMoeLayer(DecoderLayer):
    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        if has_experts(config, index):
            return SparseMLP(config, fmt)
        return super().make_mlp(config, index, fmt)


class QwenMoeModel(LlamaModel):
    layer_type = QwenMoeLayer
