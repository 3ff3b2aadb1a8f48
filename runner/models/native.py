"""Runs the decoder layers of a model in native code, on a CPU whose weights are native.

A model describes its layers (`NativeBlock`); what the native code needs of them is gathered when
the first step comes, since weights and KV cache are there by then. Where something does not fit,
torch runs the layers one operation at a time, with the same weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.cpu.layers import (
    LayerAttention,
    LayerWeights,
    NativeLayers,
    Step,
    StepGroup,
    why_not,
)
from ..attention.base import AttentionLayer, AttentionState
from ..attention.reference import ReferenceMetadata
from .layers import Linear, RMSNorm
from .rotary import RotaryEmbedding

logger = logging.getLogger(__name__)


class NativeBlock(Protocol):
    """A decoder layer that the native code knows."""

    def linears(self) -> Sequence[Linear]:
        """Its projections: query, key and value fused; output; gate and up fused; down."""

    def native_weights(self) -> LayerWeights | None:
        """Its weights for the native code, as the function `native_weights` returns them."""


def native_weights(
    linears: Sequence[Linear],
    activation: str,
    input_norm: RMSNorm,
    mlp_norm: RMSNorm,
    attention_out_norm: RMSNorm | None = None,
    mlp_out_norm: RMSNorm | None = None,
    head_norms: tuple[RMSNorm | None, RMSNorm | None] = (None, None),
) -> LayerWeights | None:
    """A layer's weights; None unless every projection is loaded and native (`Linear.matrix`).

    `linears`: see `NativeBlock.linears`. `activation`: "silu" or "gelu_tanh". The norms before
    attention and MLP are required; those of their outputs and of query and key heads are optional.
    """
    matrices = [linear.matrix for linear in linears]
    qkv, o, gate_up, down = matrices
    if qkv is None or o is None or gate_up is None or down is None:
        return None

    def weight_of(norm: RMSNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    return LayerWeights(
        qkv,
        o,
        gate_up,
        down,
        input_norm.weight,
        mlp_norm.weight,
        weight_of(attention_out_norm),
        weight_of(mlp_out_norm),
        weight_of(head_norms[0]),
        weight_of(head_norms[1]),
        input_norm.eps,
        activation,
    )


class NativeDecoder:
    def __init__(
        self,
        blocks: Sequence[NativeBlock],
        layers: Sequence[AttentionLayer],
        rotaries: Sequence[RotaryEmbedding],
    ) -> None:
        """One attention layer and one rotary embedding for each block."""
        self._blocks, self._layers, self._rotaries = list(blocks), list(layers), list(rotaries)
        self._linears = [linear for block in blocks for linear in block.linears()]
        self._made_for: tuple[object, object] = (None, None)
        self._native: NativeLayers | None = None

    def runs(self, attention: AttentionState) -> bool:
        """Whether native code can run a pass with this state; torch must run it otherwise.

        When weights or caches have changed, this first gathers them again.
        """
        caches, matrices = attention.kv_caches, [linear.matrix for linear in self._linears]
        if caches is not self._made_for[0] or matrices != self._made_for[1]:
            self._native = self._make(attention)
            self._made_for = caches, matrices
        return self._native is not None and all(
            one is None or isinstance(one, ReferenceMetadata) for one in attention.metadata
        )

    def run(
        self,
        stream: Tensor,
        positions: Tensor,
        attention: AttentionState,
        boundaries: Sequence[int] = (),
        keep: Callable[[int, Tensor], None] | None = None,
        first_input: Tensor | None = None,
    ) -> None:
        """Run all layers on `stream` [M, H], in place. Call it only if `runs(attention)` is True.

        `keep` is called with each of `boundaries`, ascending, and the stream after that number of
        layers. It must copy the stream, which later layers overwrite. `positions`: [M] int64.
        `first_input`: see `NativeLayers.run`.
        """
        assert self._native is not None
        step, begin = _step_of(positions, attention), 0
        for end in boundaries:
            self._native.run(stream, step, begin, end, first_input)
            if end > begin:
                begin, first_input = end, None
            if keep is not None:
                keep(end, stream)
        self._native.run(stream, step, begin, None, first_input)

    def _make(self, attention: AttentionState) -> NativeLayers | None:
        made = []
        for block, layer, rotary in zip(self._blocks, self._layers, self._rotaries, strict=True):
            weights = block.native_weights()
            if weights is None:
                return None
            at = _attention_of(layer, rotary, attention)
            reason = "its attention is of another kind" if at is None else why_not(weights, at)
            if attention.layers[layer.layer_id].fp8 is not None:  # `layer` does not know its cache
                reason = "its KV cache is fp8"
            if at is None or reason is not None:
                logger.info("torch runs layer %d and all others: %s", layer.layer_id, reason)
                return None
            made.append((weights, at))
        return NativeLayers(made)


def _attention_of(
    layer: AttentionLayer, rotary: RotaryEmbedding, attention: AttentionState
) -> LayerAttention | None:
    if layer.is_mla or layer.kv_source is not None or layer.sinks is not None or rotary.interleaved:
        return None
    if layer.head_dim_v not in (None, layer.head_dim):
        return None
    return LayerAttention(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.scale,
        layer.sliding_window,
        layer.softcap,
        rotary.cos_sin_cache,
        attention.kv_caches[layer.layer_id],
        attention.group_of_layer[layer.layer_id],
    )


def _step_of(positions: Tensor, attention: AttentionState) -> Step:
    """The step that this state belongs to; positions: [M] int64."""
    common, groups = None, []
    for metadata in attention.metadata:
        if metadata is None:  # a group of which a drafter uses no layer
            groups.append(StepGroup(_NO_TABLE, _NO_SLOTS, 1))
            continue
        assert isinstance(metadata, ReferenceMetadata)
        common = metadata.common
        groups.append(StepGroup(common.block_table, common.slot_mapping, metadata.block_size))
    assert common is not None
    return Step(positions, common.query_start_loc, common.seq_lens, groups)


_NO_TABLE, _NO_SLOTS = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
