"""Gemma 4's language model: two head sizes, layers that read another layer's cache, layers whose
keys are also their values, per-layer embeddings, and experts next to a dense MLP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.linear.experts import Routing
from ...kernels.linear.moe import select_experts
from ...kernels.linear.norm_rope import rms_norm
from ..attention.base import AttentionLayer, AttentionState
from ..parallel.ranks import head_counts
from .base import AuxHiddenStates, ForwardOutput, TextModel
from .gemma3 import MLP, check_gelu, embedding_scale, soft_cap, text_name
from .layers import CheckpointSlot, Embedding, Linear, RMSNorm, WeightFormat, tensor_slot
from .moe import Experts
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters
from .sharded import qkv_linear, row_linear

_SHARED_KV = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.")


def head_shape(config: Any, index: int) -> tuple[int, int]:
    """Return the number of KV heads and the head size of layer `index`.

    Layers with full attention may have other numbers than those with a sliding window.
    """
    layers = getattr(config, "per_layer_config", None)
    if layers is not None:
        return int(layers[index].num_key_value_heads), int(layers[index].head_dim)
    heads, size = config.num_key_value_heads, config.head_dim
    if config.layer_types[index] == "full_attention":
        size = getattr(config, "global_head_dim", None) or size
        if config.attention_k_eq_v:
            heads = getattr(config, "num_global_key_value_heads", None) or heads
    return int(heads), int(size)


def kv_source(config: Any, index: int) -> int | None:
    """Return the layer whose cache layer `index` reads, or None if it has a cache of its own.

    The source is the last layer of the same type that has a cache.
    """
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    if index < first_shared:
        return None
    types = config.layer_types
    return max(i for i in range(first_shared) if types[i] == types[index])


def make_norm(size: int, config: Any, fmt: WeightFormat) -> RMSNorm:
    """Gemma 4's norm: the weight is used as stored and applied in fp32."""
    return RMSNorm(size, config.rms_norm_eps, fmt, exact=True)


def make_rotary(config: Any, max_position: int, device: torch.device) -> dict[str, RotaryEmbedding]:
    """Return the rotary embedding of each layer type, since the types may have other head sizes."""
    return {
        kind: RotaryEmbedding(
            rope_parameters(config, kind),
            head_shape(config, config.layer_types.index(kind))[1],
            max_position,
            device,
        )
        for kind in sorted(set(config.layer_types))
    }


class Attention(nn.Module):
    """Attention with scale 1, since queries and keys are normed.

    With `source`, the id of another layer, it reads that layer's cache and has no keys and values
    of its own.
    """

    def __init__(
        self, config: Any, index: int, layer_id: int, source: int | None, fmt: WeightFormat
    ) -> None:
        super().__init__()
        self.layer_type: str = config.layer_types[index]
        sliding = self.layer_type == "sliding_attention"
        heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        kv_heads, self.head_dim = head_shape(config, index)
        self.num_heads, self.num_kv_heads = head_counts(fmt.ranks, heads, kv_heads)
        self.layer = AttentionLayer(
            layer_id,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=1.0,
            sliding_window=config.sliding_window if sliding else None,
            kv_source=source,
        )
        names = ["q_proj"]
        self.values_are_keys = config.attention_k_eq_v and not sliding
        if source is None:
            names.append("k_proj")
            if not self.values_are_keys:
                names.append("v_proj")
            self.k_norm = make_norm(self.head_dim, config, fmt)
        hidden, bias, size = config.hidden_size, config.attention_bias, heads * self.head_dim
        both = (heads, kv_heads)
        self.qkv_proj = qkv_linear(hidden, both, self.head_dim, fmt, bias, names=tuple(names))
        self.o_proj = row_linear(size, hidden, fmt, bias, what="heads", groups=heads)
        self.q_norm = make_norm(self.head_dim, config, fmt)

    def forward(
        self, hidden: Tensor, rotary: dict[str, RotaryStep], attention: AttentionState
    ) -> Tensor:
        """hidden: [M, H] -> [M, H]; `rotary` is by layer type."""
        tokens, step = hidden.shape[0], rotary[self.layer_type]
        heads = self.qkv_proj.forward(hidden).view(tokens, -1, self.head_dim)
        query = step.rotate(self.q_norm.forward(heads[:, : self.num_heads]))
        key = value = None
        if self.layer.kv_source is None:
            raw = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
            key = step.rotate(self.k_norm.forward(raw))
            raw = raw if self.values_are_keys else heads[:, self.num_heads + self.num_kv_heads :]
            value = rms_norm(raw, None, self.eps)
        out = attention.attend(self.layer.layer_id, query, key, value)
        return self.o_proj.forward(out.reshape(tokens, -1))


class Router(nn.Module):
    """Selects experts for each token from the normed and scaled stream."""

    scale: Tensor  # [H]
    per_expert_scale: Tensor  # [E]

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        self.eps, self.root = config.rms_norm_eps, config.hidden_size**-0.5
        self.routing = Routing(config.top_k_experts, renormalise=True)
        self.proj = Linear(config.hidden_size, config.num_experts, fmt)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", config.num_experts)):
            self.register_buffer(name, torch.empty(size, dtype=fmt.dtype, device=fmt.device))

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """stream: [M, H] -> (weights [M, k] fp32, ids [M, k])."""
        scaled = rms_norm(stream, None, self.eps) * self.scale * self.root
        weights, ids = select_experts(self.proj.forward(scaled).float(), self.routing)
        return weights * self.per_expert_scale[ids].float(), ids

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.scale", tensor_slot(self.scale, "ones")
        yield f"{parent}{name}.per_expert_scale", tensor_slot(self.per_expert_scale, "ones")


class DecoderLayer(nn.Module):
    """A block with norms around both sublayers, optional experts and an optional per-layer
    embedding. Its whole output is scaled."""

    layer_scalar: Tensor  # [1]

    def __init__(
        self, config: Any, index: int, layer_id: int, source: int | None, fmt: WeightFormat
    ) -> None:
        super().__init__()
        hidden, ple = config.hidden_size, config.hidden_size_per_layer_input
        self.self_attn = Attention(config, index, layer_id, source, fmt)
        wide = 2 if config.use_double_wide_mlp and source is not None else 1
        self.mlp = MLP(hidden, config.intermediate_size * wide, fmt)
        self.input_layernorm = make_norm(hidden, config, fmt)
        self.post_attention_layernorm = make_norm(hidden, config, fmt)
        self.pre_feedforward_layernorm = make_norm(hidden, config, fmt)
        self.post_feedforward_layernorm = make_norm(hidden, config, fmt)
        one = torch.empty(1, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("layer_scalar", one)
        self.has_experts, self.has_ple = bool(config.enable_moe_block), bool(ple)
        if self.has_experts:
            size = config.moe_intermediate_size
            self.router = Router(config, fmt)
            self.experts = Experts(config.num_experts, hidden, size, fmt, "gelu_tanh")
            self.experts.expert_share = config.top_k_experts / config.num_experts
            self.post_feedforward_layernorm_1 = make_norm(hidden, config, fmt)
            self.post_feedforward_layernorm_2 = make_norm(hidden, config, fmt)
            self.pre_feedforward_layernorm_2 = make_norm(hidden, config, fmt)
        if self.has_ple:
            self.per_layer_input_gate = Linear(hidden, ple, fmt)
            self.per_layer_projection = Linear(ple, hidden, fmt)
            self.post_per_layer_input_norm = make_norm(hidden, config, fmt)

    def forward(
        self,
        stream: Tensor,
        ple: Tensor | None,
        rotary: dict[str, RotaryStep],
        attention: AttentionState,
    ) -> Tensor:
        """stream: [M, H] -> [M, H]; ple: [M, P], this layer's own embedding of the tokens."""
        out = self.self_attn.forward(self.input_layernorm.forward(stream), rotary, attention)
        normed, stream = self.pre_feedforward_layernorm.add(
            self.post_attention_layernorm.forward(out), stream
        )
        out = self.mlp.forward(normed)
        if self.has_experts:
            weights, ids = self.router.forward(stream)
            routed = self.pre_feedforward_layernorm_2.forward(stream)
            routed = self.experts.sum(self.experts.forward(routed, weights, ids))
            out = self.post_feedforward_layernorm_1.forward(out)
            out = out + self.post_feedforward_layernorm_2.forward(routed)
        stream = stream + self.post_feedforward_layernorm.forward(out)
        if ple is not None:
            gate = F.gelu(self.per_layer_input_gate.forward(stream), approximate="tanh")
            out = self.per_layer_projection.forward(gate * ple)
            stream = stream + self.post_per_layer_input_norm.forward(out)
        return stream * self.layer_scalar

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.layer_scalar", tensor_slot(self.layer_scalar, "ones")


class Gemma4Model(TextModel):
    """The whole language model. Attention layer i has the id `layer_id_offset + i`."""

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        super().__init__(config, fmt)
        check_gelu(config)
        hidden, count = config.hidden_size, config.num_hidden_layers
        self.sources = [kv_source(config, index) for index in range(count)]
        self.blocks = [
            DecoderLayer(
                config,
                index,
                layer_id_offset + index,
                None if source is None else layer_id_offset + source,
                fmt,
            )
            for index, source in enumerate(self.sources)
        ]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = make_norm(hidden, config, fmt)
        self.scale = embedding_scale(hidden, fmt.dtype)
        self.rotary = make_rotary(config, max_position, fmt.device)
        self.ple_size = config.hidden_size_per_layer_input
        if self.ple_size:
            size, rows = count * self.ple_size, config.vocab_size_per_layer_input
            self.embed_tokens_per_layer = Embedding(rows, size, fmt)
            self.per_layer_model_projection = Linear(hidden, size, fmt)
            self.per_layer_projection_norm = make_norm(self.ple_size, config, fmt)
            self.ple_scale = embedding_scale(self.ple_size, fmt.dtype)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens.forward(input_ids) * self.scale

    def per_layer_embeddings(self, input_ids: Tensor, stream: Tensor) -> list[Tensor | None]:
        """One [M, P] per layer, computed from token ids and their embeddings `stream` [M, H].

        A list of None for models without per-layer embeddings.
        """
        if not self.ple_size:
            return [None] * len(self.blocks)
        shape = (stream.shape[0], len(self.blocks), self.ple_size)
        identity = self.embed_tokens_per_layer.forward(input_ids).view(shape) * self.ple_scale
        context = self.per_layer_model_projection.forward(stream) * stream.shape[1] ** -0.5
        context = self.per_layer_projection_norm.forward(context.view(shape))
        return list(((context + identity) * 2.0**-0.5).unbind(1))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        stream = self.embed(input_ids)
        per_layer = self.per_layer_embeddings(input_ids, stream)
        rotary = {kind: table.at(positions) for kind, table in self.rotary.items()}
        aux = AuxHiddenStates(aux_boundaries, stream, into)
        for index, (block, ple) in enumerate(zip(self.blocks, per_layer, strict=True)):
            aux.keep(index, stream)
            stream = block.forward(stream, ple, rotary, attention)
        aux.keep(len(self.blocks), stream)
        out = None if into is None else into[0]
        return self.norm.add(stream, None, out=out)[0], aux.all

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(super().compute_logits(hidden), self.config.final_logit_softcapping)

    def checkpoint_name(self, name: str) -> str | None:
        text = text_name(name)
        shared = None if text is None else _SHARED_KV.match(text)
        if text is None or (shared and self.sources[int(shared.group(1))] is not None):
            return None
        return super().checkpoint_name(text)
