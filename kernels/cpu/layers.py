"""Decoder layers of a step in one native call; see native/layer.h.

A layer is Llama's or Gemma 3's kind: norm, grouped-query attention over a paged cache, norm, gated
feed-forward; with norms behind both halves if they are given. Every layer stores its step's keys
and values before it attends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bindings import GroupFields, LayerFields, StepFields, library
from .matrix import Matrix

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_LANES = 16


@dataclass(frozen=True)
class LayerWeights:
    """What a layer is made of. Norm weights are fp32."""

    qkv: Matrix  # query heads, key heads, value heads
    o: Matrix
    gate_up: Matrix  # two parts of equal size
    down: Matrix
    input_norm: Tensor  # [H]
    mlp_norm: Tensor  # [H], before the feed-forward
    attention_out_norm: Tensor | None  # [H]
    mlp_out_norm: Tensor | None  # [H]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    eps: float
    activation: str  # "silu" or "gelu_tanh"


@dataclass(frozen=True)
class LayerAttention:
    """A layer's attention and where its keys and values are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    cos_sin: Tensor  # [positions, rotary_dim] fp32
    kv_cache: Tensor  # [2, num_blocks, block_size, num_kv_heads, head_dim] fp32
    group: int  # index into a step's groups


@dataclass(frozen=True)
class StepGroup:
    """One KV group of a step."""

    block_table: Tensor  # [num_requests, max_blocks] int32
    slot_mapping: Tensor  # [num_rows] int64, -1 = do not write
    block_size: int


@dataclass(frozen=True)
class Step:
    """The rows of a step. Rows of no request, behind the last one, get no attention."""

    positions: Tensor  # [num_rows] int64
    query_start_loc: Tensor  # [num_requests + 1] int32
    seq_lens: Tensor  # [num_requests] int32, cached tokens including this step's
    groups: Sequence[StepGroup]


def why_not(weights: LayerWeights, attention: LayerAttention) -> str | None:
    """None if the native code can run such a layer, else one reason why not."""
    tensors = (weights.input_norm, weights.mlp_norm, attention.cos_sin, attention.kv_cache)
    if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in tensors):
        return "its tensors are not contiguous float32"
    if attention.head_dim % _LANES:
        return f"its head dimension {attention.head_dim} is no multiple of {_LANES}"
    gate_up = weights.gate_up
    if len(gate_up.parts) != 2 or gate_up.rows != 2 * weights.down.columns:
        return "its feed-forward is not gated"
    return None


class NativeLayers:
    """Layers in order, ready to run."""

    def __init__(self, layers: Sequence[tuple[LayerWeights, LayerAttention]]) -> None:
        self._kept = list(layers)  # the native code knows addresses
        self._fields = [_layer_fields(weights, attention) for weights, attention in layers]
        addresses = [ctypes.addressof(fields) for fields in self._fields]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.hidden_size = layers[0][0].o.rows
        native = library()
        assert native is not None
        self._run = native.slipstream_layers

    def run(
        self,
        stream: Tensor,
        step: Step,
        begin: int = 0,
        end: int | None = None,
        first_input: Tensor | None = None,
    ) -> None:
        """Take `stream` [num_rows, H] fp32, contiguous, through layers [begin, end), in place.

        `first_input` [num_rows, W] is what the first of them projects to queries, keys and values,
        in place of its normed stream.
        """
        count = (len(self._fields) if end is None else end) - begin
        if count == 0 or stream.shape[0] == 0:
            return
        assert stream.is_contiguous() and stream.shape[1] == self.hidden_size
        if first_input is not None:
            width = self._kept[begin][0].qkv.columns
            assert first_input.is_contiguous() and first_input.shape == (stream.shape[0], width)
        groups = (GroupFields * len(step.groups))()
        for fields, group in zip(groups, step.groups, strict=True):
            table = group.block_table
            assert table.stride(1) == 1 or table.shape[1] == 1
            fields.block_table, fields.table_stride = table.data_ptr(), table.stride(0)
            fields.slots, fields.block_size = group.slot_mapping.data_ptr(), group.block_size
        fields_of_step = StepFields(
            stream.shape[0],
            step.seq_lens.shape[0],
            self.hidden_size,
            step.positions.data_ptr(),
            step.query_start_loc.data_ptr(),
            step.seq_lens.data_ptr(),
            ctypes.addressof(groups),
            None if first_input is None else first_input.data_ptr(),
        )
        self._run(
            ctypes.addressof(self._addresses) + begin * ctypes.sizeof(ctypes.c_void_p),
            count,
            fields_of_step,
            stream.data_ptr(),
            torch.get_num_threads(),
        )


def _layer_fields(weights: LayerWeights, attention: LayerAttention) -> LayerFields:
    fields = LayerFields()
    for name in ("qkv", "o", "gate_up", "down"):
        setattr(fields, name, getattr(weights, name).fields)
    norms = ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm", "q_norm", "k_norm")
    for name in norms:
        norm = getattr(weights, name)
        setattr(fields, name, None if norm is None else norm.data_ptr())
    fields.eps, fields.scale = weights.eps, attention.scale
    fields.softcap = attention.softcap or 0.0
    fields.window = attention.sliding_window or 0
    for name in ("num_heads", "num_kv_heads", "head_dim", "group"):
        setattr(fields, name, getattr(attention, name))
    fields.activation = _ACTIVATIONS[weights.activation]
    fields.cos_sin = attention.cos_sin.data_ptr()
    fields.max_position, fields.rotary_dim = attention.cos_sin.shape
    keys, values = attention.kv_cache
    fields.keys, fields.values = keys.data_ptr(), values.data_ptr()
    return fields
