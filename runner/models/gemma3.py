"""Gemma 3's language model: norms before and after each sublayer, and windowed layers with their
own rotary base."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.cpu.layers import LayerWeights
from ...kernels.linear.activation import gelu_tanh_and_mul
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..parallel.ranks import head_counts
from .base import AuxHiddenStates, ForwardOutput, TextModel
from .layers import Linear, RMSNorm, WeightFormat
from .native import NativeDecoder, native_weights
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters
from .sharded import column_linear, qkv_linear, row_linear

_LANGUAGE = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
_OTHER_PARTS = re.compile(
    r"^(?:model\.)?(?:vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)


def text_name(name: str) -> str | None:
    """The name that a tensor has in a text-only checkpoint; None for vision and audio parts."""
    if _OTHER_PARTS.match(name):
        return None
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return _LANGUAGE.sub("model.", name)


def check_gelu(config: Any) -> None:
    """Raise ModelLoadError unless the MLPs use tanh-approximated GELU and attention is causal."""
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise ModelLoadError(f"activation {config.hidden_activation!r} is not supported for Gemma.")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelLoadError("Gemma models with bidirectional attention cannot generate text.")


def embedding_scale(size: int, dtype: torch.dtype) -> float:
    """The factor on embeddings: sqrt(size), rounded to the weights' dtype as in training."""
    return float(torch.tensor(size**0.5, dtype=dtype))


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap)."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


class MLP(nn.Module):
    """A GELU-gated feed-forward layer with fused gate and up projections."""

    def __init__(self, hidden: int, intermediate: int, fmt: WeightFormat) -> None:
        super().__init__()
        shards = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = column_linear(hidden, shards, fmt)
        self.down_proj = row_linear(intermediate, hidden, fmt)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        return self.down_proj.forward(gelu_tanh_and_mul(self.gate_up_proj.forward(hidden)))


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.layer_type: str = config.layer_types[index]
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads, self.num_kv_heads = head_counts(fmt.ranks, heads, kv_heads)
        self.head_dim = config.head_dim
        self.layer = AttentionLayer(
            layer_id,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=config.query_pre_attn_scalar**-0.5,
            sliding_window=(
                config.sliding_window if self.layer_type == "sliding_attention" else None
            ),
            softcap=config.attn_logit_softcapping,
        )
        hidden, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = qkv_linear(hidden, (heads, kv_heads), self.head_dim, fmt, bias)
        size = heads * self.head_dim
        self.o_proj = row_linear(size, hidden, fmt, bias, what="heads", groups=heads)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt, offset=1.0)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt, offset=1.0)

    def forward(
        self, hidden: Tensor, rotary: dict[str, RotaryStep], attention: AttentionState
    ) -> Tensor:
        """hidden: [M, H] -> [M, H]; `rotary` is by layer type."""
        tokens, step = hidden.shape[0], rotary[self.layer_type]
        heads = self.qkv_proj.forward(hidden).view(tokens, -1, self.head_dim)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads : -self.num_kv_heads]
        value = heads[:, -self.num_kv_heads :]
        query = step.rotate(self.q_norm.forward(query))
        key = step.rotate(self.k_norm.forward(key))
        out = attention.attend(self.layer.layer_id, query, key, value)
        return self.o_proj.forward(out.reshape(tokens, -1))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, offset=1.0)

        self.self_attn = Attention(config, index, layer_id, fmt)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, fmt)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(
        self, stream: Tensor, rotary: dict[str, RotaryStep], attention: AttentionState
    ) -> Tensor:
        """stream: [M, H] -> [M, H]."""
        out = self.self_attn.forward(self.input_layernorm.forward(stream), rotary, attention)
        normed, stream = self.pre_feedforward_layernorm.add(
            self.post_attention_layernorm.forward(out), stream
        )
        return stream + self.post_feedforward_layernorm.forward(self.mlp.forward(normed))

    def linears(self) -> Sequence[Linear]:
        attend, mlp = self.self_attn, self.mlp
        return attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj

    def native_weights(self) -> LayerWeights | None:
        return native_weights(
            self.linears(),
            "gelu_tanh",
            self.input_layernorm,
            self.pre_feedforward_layernorm,
            self.post_attention_layernorm,
            self.post_feedforward_layernorm,
            (self.self_attn.q_norm, self.self_attn.k_norm),
        )


class Gemma3Model(TextModel):
    """The whole language model. Attention layer i has the id `layer_id_offset + i`."""

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        super().__init__(config, fmt)
        check_gelu(config)
        self.blocks = [
            DecoderLayer(config, index, layer_id_offset + index, fmt)
            for index in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, offset=1.0)
        self.scale = embedding_scale(config.hidden_size, fmt.dtype)
        self.rotary = {
            kind: RotaryEmbedding(
                rope_parameters(config, kind), config.head_dim, max_position, fmt.device
            )
            for kind in sorted(set(config.layer_types))
        }
        self.decoder: NativeDecoder | None = None  # runs the blocks where it can
        if fmt.native and fmt.ranks is None:  # it runs layers without collectives
            rotaries = [self.rotary[kind] for kind in config.layer_types]
            self.decoder = NativeDecoder(self.blocks, self.attention_layers(), rotaries)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens.forward(input_ids) * self.scale

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        stream = self.embed(input_ids)
        aux = AuxHiddenStates(aux_boundaries, stream, into)
        if self.decoder is not None and self.decoder.runs(attention):
            self.decoder.run(stream, positions, attention, aux_boundaries, aux.keep)
        else:
            rotary = {kind: table.at(positions) for kind, table in self.rotary.items()}
            for index, block in enumerate(self.blocks):
                aux.keep(index, stream)
                stream = block.forward(stream, rotary, attention)
            aux.keep(len(self.blocks), stream)
        out = None if into is None else into[0]
        return self.norm.add(stream, None, out=out)[0], aux.all

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(super().compute_logits(hidden), self.config.final_logit_softcapping)

    def checkpoint_name(self, name: str) -> str | None:
        text = text_name(name)
        return None if text is None else super().checkpoint_name(text)
