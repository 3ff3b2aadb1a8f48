"""The Llama family: Llama 2 and 3.x, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3
(QK norm). They differ only in constants that their configs state or imply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.cpu.layers import LayerWeights
from ...kernels.linear.activation import silu_and_mul
from ...kernels.linear.embedding import embedding
from ...kernels.linear.linear import Norm
from ...kernels.packed.coded import Coding
from ..attention.base import AttentionLayer, AttentionState, Rotary
from ..errors import ModelLoadError
from ..parallel.ranks import head_counts
from .base import PreNormModel
from .formats.row_decoder import RowDecoder, RowWeights, tiled_matrix
from .layers import Linear, RMSNorm, WeightFormat
from .native import NativeDecoder, native_weights
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters
from .sharded import column_linear, qkv_linear, row_linear

_INPUT_BIAS = ("qwen2", "glm4_moe")  # types whose attention has biases at its inputs only


@dataclass(frozen=True)
class _Traits:
    """Properties of a model that its config states or its `model_type` implies."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _traits(config: Any) -> _Traits:
    kind = config.model_type
    bias = bool(getattr(config, "attention_bias", False))
    return _Traits(
        # for draft heads the config states these two, derived from the checkpoint's tensors
        qkv_bias=bool(getattr(config, "qkv_bias", bias or kind == "qwen2")),
        output_bias=bool(getattr(config, "output_bias", bias and kind not in _INPUT_BIAS)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe") or bool(getattr(config, "use_qk_norm", False)),
    )


def _sliding_window(config: Any, index: int) -> int | None:
    """The sliding window of layer `index`; None for full attention."""
    window: int | None = getattr(config, "sliding_window", None) or None  # 0 is none, too
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return window if config.model_type != "llama" else None


class Attention(nn.Module):
    """Grouped-query attention with a fused QKV projection."""

    query_scales: Tensor | None = None  # [max_position] float32, factors of queries by position

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, traits = config.hidden_size, _traits(config)
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        self.num_heads, self.num_kv_heads = head_counts(fmt.ranks, heads, kv_heads)
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.q_size = self.num_heads * self.head_dim
        self.layer = AttentionLayer(
            layer_id,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=_sliding_window(config, index),
        )
        bias = traits.qkv_bias
        self.qkv_proj = qkv_linear(hidden, (heads, kv_heads), self.head_dim, fmt, bias, "qkv")
        size, bias = heads * self.head_dim, traits.output_bias
        self.o_proj = row_linear(size, hidden, fmt, bias, "o", what="heads", groups=heads)
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
        """hidden: [M, H], normed first if `norm` is given -> [M, H].

        The result has `residual` added if given; otherwise it may be partial sums [S, M, H]. With
        `only`, [N] int64, it has only these rows.
        """
        if rotary.cos is None:
            # A fused kernel after the projection adds up partial sums, norms heads, rotates and, if
            # the attention back end supports it, stores keys and values.
            out = self.attend_heads(self.qkv_proj.parts(hidden, norm), rotary, attention)
            out = selected(out, only)
            return self.o_proj.parts(out) if residual is None else self.o_proj.add(out, residual)
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
        if self.query_scales is not None:
            query = (query * self._scales(rotary)).to(query.dtype)
        out = attention.attend(self.layer.layer_id, query, key, value)
        return self.o_proj.forward(selected(out.reshape(tokens, self.q_size), only))

    def attend_heads(
        self, qkv: Tensor, rotary: RotaryStep, attention: AttentionState, whole: bool = False
    ) -> Tensor:
        """What attention computes of the results of `qkv_proj`, [M, N] or parts [S, M, N], before
        the output projection: [M, heads * head_dim]. `whole`: see `Rotation`."""
        heads = qkv.view(*qkv.shape[:-1], -1, self.head_dim)
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(heads, counts, dim=-2)
        if self.query_scales is not None:  # rotation and scale commute
            query.mul_(self._scales(rotary))
        norms = None
        if self.qk_norm:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        turn = Rotary(rotary.positions, rotary.cos_sin_cache, rotary.interleaved, norms, whole)
        out = attention.rotate_and_attend(self.layer.layer_id, query, key, value, turn)
        return out.reshape(qkv.shape[-2], self.q_size)

    def _scales(self, rotary: RotaryStep) -> Tensor:
        """The factors of this step's queries, [M, 1, 1] float32."""
        assert self.query_scales is not None
        return self.query_scales[rotary.positions].view(-1, 1, 1)


def check_silu(config: Any) -> None:
    """Raise ModelLoadError unless the feed-forward layers use SiLU.

    With any other activation the results would be wrong without a sign of it.
    """
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(
            f"activation {config.hidden_act!r} is not supported for {config.model_type}."
        )


class FeedForward(nn.Module):
    def feed(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Two tensors whose sum is the stream after this part; hidden + residual is the stream
        before it, and `norm` is applied first. Both pairs are as in `write_stream`. If it `fuses`,
        kernels may norm and add."""
        raise NotImplementedError


class MLP(FeedForward):
    """A SiLU-gated feed-forward layer with fused gate and up projections; see `check_silu`."""

    def __init__(
        self, hidden: int, intermediate: int, fmt: WeightFormat, bias: bool, sums: bool = True
    ) -> None:
        """Without `sums`, the output is this rank's part of the sum over ranks."""
        super().__init__()
        shards = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = column_linear(hidden, shards, fmt, bias, "gate_up")
        self.down_proj = row_linear(intermediate, hidden, fmt, bias, "down", sums=sums)
        self.is_plain = fmt.is_plain

    def norms(self, num_rows: int) -> bool:
        """True if `parts` can norm its input of `num_rows` rows itself."""
        return self.gate_up_proj.norms(num_rows)

    def adds(self, num_rows: int) -> bool:
        """True if `parts` can add a residual of `num_rows` rows itself."""
        return self.down_proj.adds(num_rows)

    def coding(self, num_rows: int) -> Coding | None:
        """How `parts` wants its input of `num_rows` rows coded; None if it takes numbers."""
        return None if self.is_plain else self.gate_up_proj.coding(num_rows)

    def feed(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = hidden.shape[-2]
        norms, adds = fuses and self.norms(rows), fuses and self.adds(rows)
        coding = self.coding(rows) if fuses else None
        x, left, stream = enter(norm, hidden, residual, norms, coding)
        return self.parts(x, left, stream if adds else None), None if adds else stream

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(hidden)))

    def parts(
        self, hidden: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """`forward` of hidden [M, H], normed first if `norm` is given.

        Adds `residual` if given. Otherwise it may return partial sums [S, M, H], which the next
        norm adds up.
        """
        if self.is_plain:
            return self.forward(hidden)
        coding = self.down_proj.coding(hidden.shape[0])
        inner = self.gate_up_proj.gated(hidden, "silu", norm, coding)
        return (
            self.down_proj.parts(inner) if residual is None else self.down_proj.add(inner, residual)
        )


class DecoderLayer(nn.Module):
    """A pre-norm block. The residual is passed on separately, so that the next norm fuses the
    sum."""

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        check_silu(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.self_attn = self.make_attention(config, index, layer_id, fmt)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.mlp = self.make_mlp(config, index, fmt)
        self.is_plain = fmt.is_plain

    def make_attention(
        self, config: Any, index: int, layer_id: int, fmt: WeightFormat
    ) -> Attention:
        return Attention(config, index, layer_id, fmt)

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        return MLP(config.hidden_size, config.intermediate_size, fmt, _traits(config).mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, residual: [M, H]; the stream is their sum (see `write_stream`).

        With `only`, [N] int64, which suits the last layer, the rows after attention are limited to
        these.
        """
        rows, attend = hidden.shape[-2], self.self_attn
        fuses = not self.is_plain and rotary.cos is None
        norms = fuses and attend.qkv_proj.norms(rows)
        coding = None
        if fuses and isinstance(attend, Attention):
            coding = attend.qkv_proj.coding(rows)
        x, norm, stream = enter(self.input_layernorm, hidden, residual, norms, coding)
        stream = selected(stream, only)
        rows = stream.shape[0]
        adds = fuses and attend.o_proj.adds(rows)
        hidden = attend.forward(x, rotary, attention, norm, stream if adds else None, only)
        residual = None if adds else stream
        return self.mlp.feed(self.post_attention_layernorm, hidden, residual, fuses)

    def linears(self) -> Sequence[Linear]:
        attend, mlp = self.self_attn, self.mlp
        inner = (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, MLP) else ()
        return attend.qkv_proj, attend.o_proj, *inner

    def row_weights(self) -> RowWeights | None:
        """See `RowBlock`."""
        attend, mlp = self.self_attn, self.mlp
        plain = type(self).forward is DecoderLayer.forward and type(attend) is Attention
        if not plain or type(mlp) is not MLP:
            return None
        matrices = [tiled_matrix(linear.packed, linear.bias) for linear in self.linears()]
        norms = self.input_layernorm.inside, self.post_attention_layernorm.inside
        return RowWeights.of(matrices, norms)

    def enter_row(self, hidden: Tensor) -> Tensor:
        project = self.self_attn.qkv_proj
        x, norm, _ = enter(self.input_layernorm, hidden, None, project.norms(hidden.shape[0]))
        return project.parts(x, norm)

    def attend_row(self, qkv: Tensor, rotary: RotaryStep, attention: AttentionState) -> Tensor:
        return self.self_attn.attend_heads(qkv, rotary, attention, whole=True)

    def native_weights(self) -> LayerWeights | None:
        if not isinstance(self.mlp, MLP):
            return None
        attend = self.self_attn
        return native_weights(
            self.linears(),
            "silu",
            self.input_layernorm,
            self.post_attention_layernorm,
            head_norms=(attend.q_norm, attend.k_norm) if attend.qk_norm else (None, None),
        )


def selected(x: Tensor, only: Tensor | None) -> Tensor:
    """The rows `only` of x [M, H], or all if it is None."""
    return x if only is None else embedding(only, x)


def rows_by_block(num_blocks: int, only: Tensor | None) -> list[Tensor | None]:
    """The argument `only` of each block: just the last may skip rows, as others feed keys
    onwards."""
    return [*[None] * (num_blocks - 1), only]


def enter(
    norm: RMSNorm,
    hidden: Tensor,
    residual: Tensor | None,
    inside: bool,
    coding: Coding | None = None,
) -> tuple[Tensor, Norm | None, Tensor]:
    """Norm the stream unless the next linear layer can: (its input, the norm left to it, stream).

    The norm is left to a layer that can apply it `inside`, except if the stream is still two
    tensors that must be added first. For a layer that wants `coding`, the norm codes its rows.
    """
    if inside and residual is None:
        return hidden, norm.inside, hidden
    if coding is not None:
        x, stream = norm.add_coded(hidden, residual, coding)
    else:
        x, stream = norm.add(hidden, residual)
    return x, None, stream


class LlamaModel(PreNormModel):
    """The whole model. Attention layer i has the id `layer_id_offset + i`."""

    layer_type: type[DecoderLayer] = DecoderLayer

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        blocks = [
            self.layer_type(config, index, layer_id_offset + index, fmt)
            for index in range(config.num_hidden_layers)
        ]
        head_dim = blocks[0].self_attn.head_dim
        rotary = RotaryEmbedding(rope_parameters(config), head_dim, max_position, fmt.device)
        super().__init__(config, fmt, blocks, rotary)
        self.blocks = blocks
        if fmt.packed and fmt.ranks is None and not fmt.torch_only:
            self.row_decoder = RowDecoder(fmt.device)
        if fmt.native and fmt.ranks is None:  # it runs layers without collectives
            rotaries = [rotary] * len(blocks)
            self.decoder = NativeDecoder(blocks, self.attention_layers(), rotaries)
