"""The Llama family: Llama 2 and 3.x, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3
(QK norm). They differ by constants that their configs state or imply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.linear.activation import silu_and_mul
from ...kernels.linear.embedding import embedding
from ...kernels.linear.linear import Norm
from ..attention.base import AttentionLayer, AttentionState, Rotary
from ..errors import ModelLoadError
from .base import PreNormModel
from .layers import Linear, RMSNorm, WeightFormat
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters


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
        # draft heads state these two, which their checkpoints' tensors decide
        qkv_bias=bool(getattr(config, "qkv_bias", bias or kind == "qwen2")),
        output_bias=bool(getattr(config, "output_bias", bias and kind != "qwen2")),
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
        self.qkv_proj = Linear(hidden, shards, fmt, traits.qkv_bias, "qkv")
        self.o_proj = Linear(self.q_size, hidden, fmt, traits.output_bias, "o")
        if traits.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt)
        self.qk_norm = traits.qk_norm

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryStep,
        attention: AttentionState,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """hidden: [M, H], normed first by `norm` -> [M, H] plus `residual`, or in parts; of some
        rows, if `only` names them, [N] int64."""
        if rotary.cos is None:
            return self._fused(hidden, rotary, attention, norm, residual, only)
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
        return self.o_proj.forward(selected(out.reshape(tokens, self.q_size), only))

    def _fused(
        self,
        hidden: Tensor,
        rotary: RotaryStep,
        attention: AttentionState,
        norm: Norm | None,
        residual: Tensor | None,
        only: Tensor | None,
    ) -> Tensor:
        """`forward` where one kernel follows the projection: it sums parts, norms heads, rotates
        and, if the back end can, stores keys and values."""
        qkv = self.qkv_proj.parts(hidden, norm)
        heads = qkv.view(*qkv.shape[:-1], -1, self.head_dim)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(heads, counts, dim=-2)
        norms = None
        if self.qk_norm:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        turn = Rotary(rotary.positions, rotary.cos_sin_cache, rotary.interleaved, norms)
        out = attention.rotate_and_attend(self.layer.layer_id, query, key, value, turn)
        out = selected(out.reshape(hidden.shape[0], self.q_size), only)
        return self.o_proj.parts(out) if residual is None else self.o_proj.add(out, residual)


def check_silu(config: Any) -> None:
    """ModelLoadError for a feed-forward that is gated by something else: it would be computed
    wrongly, and nothing would tell."""
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(
            f"activation {config.hidden_act!r} is not supported for {config.model_type}."
        )


class MLP(nn.Module):
    """SiLU-gated feed-forward with fused gate and up; see `check_silu`."""

    def __init__(self, hidden: int, intermediate: int, fmt: WeightFormat, bias: bool) -> None:
        super().__init__()
        shards = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = Linear(hidden, shards, fmt, bias, "gate_up")
        self.down_proj = Linear(intermediate, hidden, fmt, bias, "down")
        self.is_plain = fmt.linear is None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(hidden)))

    def parts(
        self, hidden: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """`forward`, normed first by `norm`, plus `residual`; or in parts for a norm to sum."""
        if self.is_plain:
            return self.forward(hidden)
        inner = self.gate_up_proj.gated(hidden, "silu", norm)
        return (
            self.down_proj.parts(inner) if residual is None else self.down_proj.add(inner, residual)
        )


class DecoderLayer(nn.Module):
    """Pre-norm block; the residual sum is carried beside the hidden states, so norms fuse it."""

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        check_silu(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.self_attn = Attention(config, index, layer_id, fmt)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, fmt, _traits(config).mlp_bias)
        self.is_plain = fmt.linear is None

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, residual: [M, H]; the stream is their sum (see `write_stream`). Of the last layer
        `only` some rows, [N] int64, may be wanted: behind its attention no other is computed.
        """
        rows, attend, mlp = hidden.shape[-2], self.self_attn, self.mlp
        fuses = not self.is_plain and rotary.cos is None
        norms = fuses and attend.qkv_proj.norms(rows)
        x, norm, stream = _enter(self.input_layernorm, hidden, residual, norms)
        stream = selected(stream, only)
        rows = stream.shape[0]
        adds = fuses and attend.o_proj.adds(rows)
        hidden = attend.forward(x, rotary, attention, norm, stream if adds else None, only)
        residual = None if adds else stream
        norms, adds = fuses and mlp.gate_up_proj.norms(rows), fuses and mlp.down_proj.adds(rows)
        x, norm, stream = _enter(self.post_attention_layernorm, hidden, residual, norms)
        return mlp.parts(x, norm, stream if adds else None), None if adds else stream


def selected(x: Tensor, only: Tensor | None) -> Tensor:
    """Rows `only` of x [M, H], or all."""
    return x if only is None else embedding(only, x)


def rows_by_block(num_blocks: int, only: Tensor | None) -> list[Tensor | None]:
    """What `only` each block of a head gets: all but the last feed the next one's keys."""
    return [*[None] * (num_blocks - 1), only]


def _enter(
    norm: RMSNorm, hidden: Tensor, residual: Tensor | None, inside: bool
) -> tuple[Tensor, Norm | None, Tensor]:
    """(input of a linear layer, the norm left to it, the stream); all [M, H]. The norm is left to a
    layer that does it `inside`, but where the stream must be summed first."""
    if inside and residual is None:
        return hidden, norm.inside, hidden
    x, stream = norm.add(hidden, residual)
    return x, None, stream


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
