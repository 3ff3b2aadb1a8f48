"""The language models of Qwen3.5 (3.6, 3.8) and Qwen3-Next: gated delta nets and, in every fourth
layer, gated full attention. All norms but those of the delta nets multiply by 1 + w."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.linear.activation import sigmoid_gate
from ...kernels.linear.linear import Norm
from ...kernels.recurrent.rows import DeltaShape, DeltaWeights, OutputGate
from ..attention.base import AttentionLayer, AttentionState, Rotary
from ..attention.recurrent import RecurrentLayer
from ..errors import ModelLoadError
from ..parallel.ranks import Cut, Ranks, head_counts, stacked
from .base import PreNormModel
from .families.qwen_moe import SparseMLP, has_experts
from .layers import CheckpointSlot, Linear, RMSNorm, WeightFormat
from .llama import MLP, check_silu, enter
from .rotary import RotaryEmbedding, RotaryStep, rope_parameters
from .sharded import qkv_linear, row_linear

_LANGUAGE = re.compile(r"^model\.language_model\.")
_OTHER_PARTS = re.compile(r"^(?:model\.)?visual\.|^mtp\.")
FULL, LINEAR = "full_attention", "linear_attention"


def delta_shape(config: Any) -> DeltaShape:
    """The constants of a config's linear layers; raises ModelLoadError if they do not fit."""
    shape = DeltaShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    if min(vars(shape).values()) < 1 or shape.conv_width < 2:
        raise ModelLoadError(
            "the config's linear_num_key_heads, linear_num_value_heads, linear_key_head_dim and "
            "linear_value_head_dim must be positive, and linear_conv_kernel_dim at least 2."
        )
    if shape.num_value_heads % shape.num_key_heads:
        raise ModelLoadError(
            f"linear_num_value_heads ({shape.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({shape.num_key_heads})."
        )
    return shape


def rank_shape(whole: DeltaShape, ranks: Ranks | None) -> DeltaShape:
    """The constants of a rank's part: its key heads, with their value heads."""
    if ranks is None:
        return whole
    keys = ranks.share(whole.num_key_heads, "key heads of linear attention").size
    values = keys * (whole.num_value_heads // whole.num_key_heads)
    return replace(whole, num_key_heads=keys, num_value_heads=values)


def channel_cut(whole: DeltaShape, ranks: Ranks) -> Cut:
    """This rank's rows of a tensor [conv_channels, ...]: queries, then keys, then values."""
    sizes = (whole.key_size, whole.key_size, whole.value_size)
    return stacked([(size, ranks.share(size, "channels")) for size in sizes])


class DeltaParameters(nn.Module):
    """The weights of a layer's convolution and decay."""

    conv: Tensor  # [conv_channels, conv_width] float32
    decay_rate: Tensor  # [value heads] float32
    dt_bias: Tensor  # [value heads] float32

    def __init__(self, whole: DeltaShape, fmt: WeightFormat) -> None:
        super().__init__()
        self.whole, self.ranks = whole, fmt.ranks
        shape = rank_shape(whole, fmt.ranks)
        sizes = {
            "conv": (shape.conv_width, shape.conv_channels),
            "decay_rate": (shape.num_value_heads,),
            "dt_bias": (shape.num_value_heads,),
        }
        for name, size in sizes.items():
            empty = torch.empty(size, dtype=torch.float32, device=fmt.device)
            # Stored tap by tap, so that a kernel loads neighbouring channels at once.
            self.register_buffer(name, empty.t() if name == "conv" else empty)
        self.weights = DeltaWeights(self.conv, self.decay_rate, self.dt_bias)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        channels, width = self.whole.conv_channels, self.whole.conv_width
        heads, cut, own = (self.whole.num_value_heads,), None, None
        if self.ranks is not None:
            cut = self.ranks.share(heads[0], "value heads of linear attention")
            own = channel_cut(self.whole, self.ranks)

        def load_conv(tensor: Tensor) -> None:
            self.conv.copy_(tensor[:, 0])

        def load_decay(tensor: Tensor) -> None:
            self.decay_rate.copy_(tensor.float().exp())

        def load_bias(tensor: Tensor) -> None:
            self.dt_bias.copy_(tensor)

        yield f"{parent}conv1d.weight", CheckpointSlot((channels, 1, width), load_conv, cut=own)
        yield f"{parent}A_log", CheckpointSlot(heads, load_decay, cut=cut)
        yield f"{parent}dt_bias", CheckpointSlot(heads, load_bias, "ones", cut=cut)


class DeltaProjection(Linear):
    """All projections of the hidden state: queries, keys, values, b, a, and z.

    Qwen3.5 stores them as four matrices, and Qwen3-Next as two whose rows are `grouped` by key
    head; both are loaded into one form.
    """

    def __init__(self, hidden: int, whole: DeltaShape, fmt: WeightFormat, grouped: bool) -> None:
        shape = rank_shape(whole, fmt.ranks)
        heads = shape.num_value_heads
        shards = {"in_proj_qkv": shape.conv_channels, "in_proj_b": heads, "in_proj_a": heads}
        super().__init__(hidden, shards | {"in_proj_z": shape.value_size}, fmt, role="qkv")
        self.whole, self.delta, self.grouped = whole, shape, grouped

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        own = dict(super().checkpoint_slots(parent, name))
        if not self.grouped:
            yield from (own if self.format.ranks is None else self._split(own, parent)).items()
            return
        shape, ranks = self.delta, self.format.ranks
        ratio = shape.num_value_heads // shape.num_key_heads
        values = ratio * shape.value_dim

        def loads(*shards: str) -> list[Callable[[Any], None]]:
            return [own[f"{parent}{shard}.weight"].load for shard in shards]

        def load_qkvz(tensor: Tensor) -> None:
            groups = tensor.view(shape.num_key_heads, -1, tensor.shape[1])
            sizes = [shape.key_dim, shape.key_dim, values, values]
            query, key, value, z = (
                part.flatten(0, 1) for part in torch.split(groups, sizes, dim=1)
            )
            for load, part in zip(
                loads("in_proj_qkv", "in_proj_z"), (torch.cat((query, key, value)), z), strict=True
            ):
                load(part)

        def load_ba(tensor: Tensor) -> None:
            groups = tensor.view(shape.num_key_heads, 2, ratio, tensor.shape[1])
            for load, part in zip(loads("in_proj_b", "in_proj_a"), groups.unbind(1), strict=True):
                load(part.flatten(0, 1))

        whole = self.whole
        for part, load, rows in (
            ("qkvz", load_qkvz, whole.conv_channels + whole.value_size),
            ("ba", load_ba, 2 * whole.num_value_heads),
        ):
            cut = None if ranks is None else ranks.share(rows, "key heads", whole.num_key_heads)
            slot = CheckpointSlot((rows, self.in_features), load, cut=cut)
            yield f"{parent}in_proj_{part}.weight", slot

    def _split(self, own: dict[str, CheckpointSlot], parent: str) -> dict[str, CheckpointSlot]:
        """The slots of this rank's parts of the four matrices."""
        ranks, whole = self.format.ranks, self.whole
        assert ranks is not None
        totals = {"b": whole.num_value_heads, "a": whole.num_value_heads, "z": whole.value_size}
        for part, total in totals.items():
            path = f"{parent}in_proj_{part}.weight"
            cut = ranks.share(total, "value heads of linear attention")
            own[path] = replace(own[path], shape=(total, self.in_features), cut=cut)
        path, shape = f"{parent}in_proj_qkv.weight", (whole.conv_channels, self.in_features)
        own[path] = replace(own[path], shape=shape, cut=channel_cut(whole, ranks))
        return own


class GatedDeltaNet(nn.Module):
    def __init__(
        self, config: Any, layer_id: int, fmt: WeightFormat, grouped: bool = False
    ) -> None:
        super().__init__()
        whole = delta_shape(config)
        shape = rank_shape(whole, fmt.ranks)
        self.layer = RecurrentLayer(layer_id, shape)
        self.in_proj = DeltaProjection(config.hidden_size, whole, fmt, grouped)
        self.parameters_ = DeltaParameters(whole, fmt)
        self.norm = RMSNorm(shape.value_dim, config.rms_norm_eps, fmt, exact=True)
        self.out_proj = row_linear(
            whole.value_size, config.hidden_size, fmt, role="o", what="value channels"
        )

    def forward(
        self,
        hidden: Tensor,
        attention: AttentionState,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """hidden: [M, H], normed first if `norm` is given -> [M, H]; updates the states of the
        requests.

        The result has `residual` added if given; otherwise it may be partial sums [S, M, H].
        """
        shape = self.layer.shape
        projected = self.in_proj.forward_normed(hidden, norm)
        x, z = torch.split(projected, [shape.channels, shape.value_size], dim=-1)
        gate = OutputGate(z, self.norm.weight, self.norm.eps)
        out = attention.recur(self.layer.layer_id, x, self.parameters_.weights, gate)
        return self.out_proj.parts(out) if residual is None else self.out_proj.add(out, residual)


class GatedAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, whose output is gated per value.

    The query projection yields a query and a gate for each head.
    """

    def __init__(self, config: Any, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads, self.num_kv_heads = head_counts(fmt.ranks, heads, kv_heads)
        self.head_dim = config.head_dim
        if not getattr(config, "attn_output_gate", True):
            raise ModelLoadError("attn_output_gate must be true for this family.")
        self.layer = AttentionLayer(
            layer_id, self.num_heads, self.num_kv_heads, self.head_dim, scale=self.head_dim**-0.5
        )
        hidden, both, bias = config.hidden_size, (heads, kv_heads), bool(config.attention_bias)
        self.qkv_proj = qkv_linear(hidden, both, self.head_dim, fmt, bias, "qkv", gated=True)
        size = heads * self.head_dim
        self.o_proj = row_linear(size, hidden, fmt, bias, "o", what="heads", groups=heads)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt, offset=1.0)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, fmt, offset=1.0)

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryStep,
        attention: AttentionState,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """hidden: [M, H], normed first if `norm` is given -> [M, H].

        The result has `residual` added if given; otherwise it may be partial sums [S, M, H].
        """
        fuses = rotary.cos is None
        qkv = self.qkv_proj.parts(hidden, norm) if fuses else self.qkv_proj.forward(hidden)
        # rows of heads: query and gate of each head, then key heads, then value heads
        rows = qkv.view(*qkv.shape[:-1], -1, self.head_dim)  # [M, ...] or parts [S, M, ...]
        num_rows = 2 * self.num_heads
        query, gate = rows[..., 0:num_rows:2, :], rows[..., 1:num_rows:2, :]
        key = rows[..., num_rows : num_rows + self.num_kv_heads, :]
        value = rows[..., num_rows + self.num_kv_heads :, :]
        if fuses:  # a kernel norms and rotates, and may store and attend
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
            turn = Rotary(rotary.positions, rotary.cos_sin_cache, rotary.interleaved, norms)
            out = attention.rotate_and_attend(self.layer.layer_id, query, key, value, turn)
        else:
            query = rotary.rotate(self.q_norm.forward(query))
            key = rotary.rotate(self.k_norm.forward(key))
            out = attention.attend(self.layer.layer_id, query, key, value)
        out = sigmoid_gate(out, gate)
        return self.o_proj.parts(out) if residual is None else self.o_proj.add(out, residual)


class DecoderLayer(nn.Module):
    """A pre-norm block of one of the two kinds of attention and a feed-forward layer.

    `index` is None for a block outside the stack.
    """

    def __init__(
        self, config: Any, index: int | None, kind: str, layer_id: int, fmt: WeightFormat
    ) -> None:
        super().__init__()
        check_silu(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, fmt, offset=1.0)
        self.post_attention_layernorm = RMSNorm(hidden, eps, fmt, offset=1.0)
        self.self_attn = GatedAttention(config, layer_id, fmt) if kind == FULL else None
        grouped = config.model_type == "qwen3_next"
        self.linear_attn = None if kind == FULL else GatedDeltaNet(config, layer_id, fmt, grouped)
        self.mlp = feed_forward(config, index, fmt)
        self.is_plain = fmt.is_plain

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden, residual: [M, H]; the stream is their sum (see `write_stream`)."""
        rows = hidden.shape[-2]
        fuses = not self.is_plain and rotary.cos is None
        x, norm, stream = enter(
            self.input_layernorm, hidden, residual, fuses and self._input.norms(rows)
        )
        adds = fuses and self._output.adds(rows)
        own = stream if adds else None
        if self.linear_attn is not None:
            hidden = self.linear_attn.forward(x, attention, norm, own)
        else:
            assert self.self_attn is not None
            hidden = self.self_attn.forward(x, rotary, attention, norm, own)
        residual = None if adds else stream
        return self.mlp.feed(self.post_attention_layernorm, hidden, residual, fuses)

    @property
    def _input(self) -> Linear:
        """The projection of the layer's input."""
        if self.linear_attn is not None:
            return self.linear_attn.in_proj
        assert self.self_attn is not None
        return self.self_attn.qkv_proj

    @property
    def _output(self) -> Linear:
        """The projection after attention."""
        if self.linear_attn is not None:
            return self.linear_attn.out_proj
        assert self.self_attn is not None
        return self.self_attn.o_proj


def feed_forward(config: Any, index: int | None, fmt: WeightFormat) -> MLP | SparseMLP:
    """The feed-forward layer of block `index`: dense, or with experts.

    A block outside the stack (None) has experts if the model has any.
    """
    if getattr(config, "num_experts", 0) and (index is None or has_experts(config, index)):
        return SparseMLP(config, fmt)
    return MLP(config.hidden_size, config.intermediate_size, fmt, False)


def make_rotary(config: Any, max_position: int, fmt: WeightFormat) -> RotaryEmbedding:
    """The rotary embedding of a part of each head.

    The three position ids of `mrope_section` are equal for text.
    """
    return RotaryEmbedding(rope_parameters(config), config.head_dim, max_position, fmt.device)


class Qwen3_5Model(PreNormModel):  # noqa: N801
    """The whole language model. Full attention layers have the ids `layer_id_offset`, + 1, ...;
    those of the linear layers begin with 0."""

    def __init__(
        self, config: Any, fmt: WeightFormat, max_position: int, layer_id_offset: int = 0
    ) -> None:
        if layer_id_offset:
            raise ModelLoadError(
                f"a {config.model_type} model cannot be a drafter (method draft_model), because "
                "its recurrent states cannot be rolled back there; use its mtp module instead."
            )
        counts = {FULL: 0, LINEAR: 0}
        blocks = []
        for index, kind in enumerate(config.layer_types):
            if kind not in counts:
                raise ModelLoadError(
                    f"layer type {kind!r} is not supported; supported: {FULL}, {LINEAR}."
                )
            blocks.append(DecoderLayer(config, index, kind, counts[kind], fmt))
            counts[kind] += 1
        if len(blocks) != config.num_hidden_layers or not counts[FULL]:
            raise ModelLoadError(
                f"layer_types must name {config.num_hidden_layers} layers, at least one of them "
                f"{FULL}, but its config has {len(blocks)} with {counts[FULL]}."
            )
        super().__init__(config, fmt, blocks, make_rotary(config, max_position, fmt))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt, offset=1.0)
        self.blocks = blocks

    def attention_layers(self) -> list[AttentionLayer]:
        return [block.self_attn.layer for block in self.blocks if block.self_attn is not None]

    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [block.linear_attn.layer for block in self.blocks if block.linear_attn is not None]

    def checkpoint_name(self, name: str) -> str | None:
        if _OTHER_PARTS.match(name):
            return None
        return super().checkpoint_name(_LANGUAGE.sub("model.", name))
