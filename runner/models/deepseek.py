"""DeepSeek V2 and V3: latent attention (MLA), computed in the latent space in every step, and
mixture-of-experts layers with shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention.mla import absorb_query, expand_value
from ...kernels.linear.experts import Routing
from ..attention.base import AttentionLayer, AttentionState
from ..parallel.ranks import head_counts
from .base import PreNormModel, is_after_layers
from .layers import CheckpointSlot, Linear, RMSNorm, WeightFormat
from .llama import MLP, FeedForward, check_silu
from .moe import Chosen, Experts, RoutedMLP, Router
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters, yarn_factor, yarn_mscale
from .sharded import column_linear, row_linear

_V3 = ("deepseek_v3", "deepseek_v32")  # types with V3's experts
_LATENT_EPS = 1e-6  # for the norms inside attention, which do not use the config's


def attention_scale(config: Any) -> float:
    """The softmax scale: head size ** -0.5, times YaRN's temperature squared."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = rope_parameters(config)
    all_dim = rope.get("mscale_all_dim")
    if rope["rope_type"] == "yarn" and all_dim:
        scale *= yarn_mscale(yarn_factor(rope), all_dim) ** 2
    return scale


class LatentUp(nn.Module):
    """kv_b_proj, stored as its key and value halves per head."""

    w_uk: Tensor  # [num_heads, nope, latent]
    w_uv: Tensor  # [num_heads, v, latent]

    def __init__(
        self, num_heads: int, nope: int, value: int, latent: int, fmt: WeightFormat
    ) -> None:
        """`num_heads` counts those of all ranks."""
        super().__init__()
        self.total, self.share = num_heads * (nope + value), None
        if fmt.ranks is not None:
            self.share = fmt.ranks.share(self.total, "heads", num_heads)
            num_heads = head_counts(fmt.ranks, num_heads, num_heads)[0]
        for name, size in (("w_uk", nope), ("w_uv", value)):
            table = torch.empty(num_heads, size, latent, dtype=fmt.dtype, device=fmt.device)
            self.register_buffer(name, table)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        shape = (self.total, self.w_uk.shape[2])
        yield f"{parent}{name}.weight", CheckpointSlot(shape, self._load, cut=self.share)

    def _load(self, tensor: Tensor) -> None:
        num_heads, nope, latent = self.w_uk.shape
        heads = tensor.view(num_heads, -1, latent)
        self.w_uk.copy_(heads[:, :nope])
        self.w_uv.copy_(heads[:, nope:])


class LatentAttention(nn.Module):
    """Attention with queries mapped into the latent space, so that all heads share one cached
    row."""

    def __init__(self, config: Any, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.kv_lora_rank
        total, self.latent = config.num_attention_heads, latent
        self.num_heads = head_counts(fmt.ranks, total, total)[0]
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.layer = AttentionLayer(
            layer_id,
            self.num_heads,
            1,
            latent + self.rope,
            scale=attention_scale(config),
            head_dim_v=latent,
            is_mla=True,
        )
        bias, heads_size = bool(config.attention_bias), total * (self.nope + self.rope)
        heads = partial(column_linear, outputs=heads_size, fmt=fmt, what="heads", groups=total)
        self.q_rank: int | None = config.q_lora_rank
        down = {"kv_a_proj_with_mqa": latent + self.rope}
        if self.q_rank is None:
            self.q_proj = heads(hidden)
        else:
            down = {"q_a_proj": self.q_rank, **down}
            self.q_a_layernorm = RMSNorm(self.q_rank, _LATENT_EPS, fmt)
            self.q_b_proj = heads(self.q_rank)
        self.down_proj = Linear(hidden, down, fmt, bias)
        self.kv_a_layernorm = RMSNorm(latent, _LATENT_EPS, fmt)
        self.kv_b_proj = LatentUp(total, self.nope, config.v_head_dim, latent, fmt)
        self.fixed = fmt.batch_invariant
        size = total * config.v_head_dim
        self.o_proj = row_linear(size, hidden, fmt, bias, what="heads", groups=total)

    @property
    def layers(self) -> list[AttentionLayer]:
        return [self.layer]

    def forward(self, hidden: Tensor, rotary: RotaryStep, attention: AttentionState) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        query, row, _ = self._rows(hidden, rotary)
        return self._output(attention.attend(self.layer.layer_id, query, row, None))

    def _rows(self, hidden: Tensor, rotary: RotaryStep) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [M, heads, D], cached rows [M, 1, D], and what the queries' heads are made from:
        [M, q_lora_rank], or without that `hidden`."""
        tokens = hidden.shape[0]
        down, low = self.down_proj.forward(hidden), hidden
        if self.q_rank is None:
            heads = self.q_proj.forward(hidden)
        else:
            low = self.q_a_layernorm.forward(down[:, : self.q_rank])
            heads = self.q_b_proj.forward(low)
            down = down[:, self.q_rank :]
        heads = heads.view(tokens, self.num_heads, -1)
        # the cached row of a token: its normed latent, then the rotated part that all heads share
        row = torch.cat(
            (
                self.kv_a_layernorm.forward(down[:, : self.latent]).unsqueeze(1),
                rotary.rotate(down[:, self.latent :].unsqueeze(1)),
            ),
            dim=-1,
        )
        query = torch.cat(
            (
                absorb_query(heads[..., : self.nope], self.kv_b_proj.w_uk, self.fixed),
                rotary.rotate(heads[..., self.nope :]),
            ),
            dim=-1,
        )
        return query, row, low

    def _output(self, latent: Tensor) -> Tensor:
        """latent: [M, heads, kv_lora_rank] -> [M, H]."""
        out = expand_value(latent, self.kv_b_proj.w_uv, self.fixed)
        return self.o_proj.forward(out.reshape(latent.shape[0], -1))


def routing_of(config: Any) -> Routing:
    """The routing rule of a config.

    V3 scores by sigmoid and chooses groups by the sum of their best two experts. V2 scores by
    softmax, and `topk_method` says whether it uses groups.
    """
    v3 = config.model_type in _V3
    grouped = v3 or config.topk_method == "group_limited_greedy"
    return Routing(
        top_k=config.num_experts_per_tok,
        scoring="sigmoid" if v3 else "softmax",
        num_groups=(config.n_group or 1) if grouped else 1,
        top_groups=(config.topk_group or 1) if grouped else 1,
        group_score="top2" if v3 else "max",
        renormalise=v3 and bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
    )


class SharedMoE(RoutedMLP):
    """A feed-forward layer of routed experts and experts that every token has (DeepSeek, GLM)."""

    def __init__(
        self,
        config: Any,
        routing: Routing,
        fmt: WeightFormat,
        correction: bool,
        bias: bool = False,
    ) -> None:
        """`correction`: as in `Router`; `bias`: whether the shared experts have biases."""
        super().__init__()
        hidden, count = config.hidden_size, config.n_routed_experts
        size = config.moe_intermediate_size
        self.gate = Router(hidden, count, routing, fmt, correction=correction)
        self.experts = Experts(count, hidden, size, fmt)
        self.experts.expert_share = routing.top_k / count
        shared = config.n_shared_experts or 0
        self.shared_experts = MLP(hidden, size * shared, fmt, bias, sums=False) if shared else None

    @property
    def scorer(self) -> Router:
        return self.gate

    def routed(
        self, x: Tensor, stream: Tensor, chosen: Chosen, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As the base class. The first tensor is that of the routed experts; the second is the
        stream and the shared experts. With several ranks, which have a part of every expert, the
        first has all."""
        out = self.experts.parts(x, *chosen)
        shared = self.shared_experts
        if shared is None:
            return self.experts.sum(out), stream
        if self.experts.ranks is not None:
            return self.experts.sum(out + shared.forward(x)), stream
        if shared.is_plain:
            return out, stream + shared.forward(x)
        return out, shared.parts(x, None, stream)


class DecoderLayer(nn.Module):
    """A pre-norm block. The feed-forward part is dense in the first layers and MoE in the
    others."""

    attention: type[LatentAttention] = LatentAttention

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        check_silu(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.self_attn = self.attention(config, layer_id, fmt)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        dense = index < (config.first_k_dense_replace or 0)
        bias = bool(getattr(config, "mlp_bias", False))
        self.mlp: FeedForward = (
            MLP(config.hidden_size, config.intermediate_size, fmt, bias)
            if dense
            else SharedMoE(config, routing_of(config), fmt, config.model_type in _V3, bias)
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, residual: [M, H]; the stream is their sum (see `write_stream`).

        Returns the same for the next layer.
        """
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn.forward(hidden, rotary, attention)
        fuses = rotary.cos is None
        return self.mlp.feed(self.post_attention_layernorm, hidden, residual, fuses)


def make_rotary(config: Any, max_position: int, device: torch.device) -> RotaryEmbedding:
    interleaved = bool(getattr(config, "rope_interleave", True))
    return RotaryEmbedding(
        rope_parameters(config), config.qk_rope_head_dim, max_position, device, interleaved
    )


class DeepseekModel(PreNormModel):
    """The target model. It skips the checkpoint's multi-token-prediction layers, for the
    drafter."""

    block: type[DecoderLayer] = DecoderLayer

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        blocks: list[DecoderLayer] = []
        for index in range(config.num_hidden_layers):
            blocks.append(self.block(config, index, layer_id_offset, fmt))
            layer_id_offset += len(blocks[-1].self_attn.layers)
        rotary = self.make_rotary(config, max_position, fmt.device)
        super().__init__(config, fmt, blocks, rotary)
        self.blocks = blocks

    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> RotaryEmbedding:
        return make_rotary(config, max_position, device)

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer for block in self.blocks for layer in block.self_attn.layers]

    def checkpoint_name(self, name: str) -> str | None:
        if is_after_layers(name, len(self.blocks)):
            return None
        return super().checkpoint_name(name)
