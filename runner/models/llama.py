"""The Llama family: Llama 2 and 3.x, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3
(QK norm). They differ by constants that their configs state or imply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...kernels.activation import silu_and_mul
from ..attention.base import AttentionLayer, AttentionState
from ..layers import Linear, RMSNorm, WeightFormat
from ..rotary import RotaryEmbedding, RotaryStep, rope_parameters
from .base import PreNormModel


@dataclass(frozen=True)
class _Traits:
    """What `model_type` implies beyond the config's keys."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _traits(config: Any) -> _Traits:
    kind = config.model_type
    bias = bool(getattr(config, "attention_bias", False))
    return _Traits(
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _sliding_window(config: Any, index: int) -> int | None:
    """Window of layer `index`, None for full attention."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return window if config.model_type != "llama" else None


class Attention(nn.Module):
    """Grouped-query attention with fused QKV."""

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, traits = config.hidden_size, _traits(config)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads or self.num_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // self.num_heads
        self.q_size, self.kv_size = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        self.layer = AttentionLayer(
            layer_id,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=_sliding_window(config, index),
        )
        shards = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = Linear(hidden, shards, fmt, traits.qkv_bias)
        self.o_proj = Linear(self.q_size, hidden, fmt, traits.output_bias)
        if traits.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt)
        self.qk_norm = traits.qk_norm

    def forward(self, hidden: Tensor, rotary: RotaryStep, attention: AttentionState) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        tokens = hidden.shape[0]
        qkv = self.qkv_proj.forward(hidden)
        # rows of heads: query heads, then key heads, then value heads
        heads = qkv.view(tokens, -1, self.head_dim)
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        value = heads[:, num_heads + num_kv_heads :]
        if self.qk_norm:
            query = rotary.rotate(self.q_norm.forward(heads[:, :num_heads]))
            key = rotary.rotate(self.k_norm.forward(heads[:, num_heads : num_heads + num_kv_heads]))
        else:
            rotated = rotary.rotate(heads[:, : num_heads + num_kv_heads])
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        out = attention.attend(self.layer.layer_id, query, key, value)
        return self.o_proj.forward(out.reshape(tokens, self.q_size))


class MLP(nn.Module):
    """SiLU-gated feed-forward with fused gate and up."""

    def __init__(self, hidden: int, intermediate: int, fmt: WeightFormat, bias: bool) -> None:
        super().__init__()
        shards = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = Linear(hidden, shards, fmt, bias)
        self.down_proj = Linear(intermediate, hidden, fmt, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(hidden)))


class DecoderLayer(nn.Module):
    """Pre-norm block; the residual sum is carried beside the hidden states, so norms fuse it."""

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.self_attn = Attention(config, index, layer_id, fmt)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, fmt, _traits(config).mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual: [M, H]; the stream is their sum."""
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn.forward(hidden, rotary, attention)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp.forward(hidden), residual


class LlamaModel(PreNormModel):
    """The whole model; attention layer i has id `layer_id_offset + i`."""

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        blocks = [
            DecoderLayer(config, index, layer_id_offset + index, fmt)
            for index in range(config.num_hidden_layers)
        ]
        head_dim = blocks[0].self_attn.head_dim
        rotary = RotaryEmbedding(rope_parameters(config), head_dim, max_position, fmt.device)
        super().__init__(config, fmt, blocks, rotary)
        self.blocks = blocks

    def attention_layers(self) -> list[AttentionLayer]:
        return [block.self_attn.layer for block in self.blocks]
