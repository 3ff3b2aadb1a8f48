"""PIECEWISE graphs, which are cut at attention: graph, attention, graph, attention, ..., graph.
Recurrent layers are cut in the same way.

The model is recorded with a `BreakableState` in place of its `AttentionState`; every `attend` ends
one segment and begins the next. Attention is neither recorded nor run at capture. At replay it runs
eagerly with the step's own metadata, on the real rows only (vllm#36626).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.recurrent.rows import DeltaWeights, OutputGate
from ..attention.base import AttentionState, Rotary
from .capture import Graph, GraphPool


@dataclass(frozen=True)
class _AttentionCut:
    """One eager attention call between two segments; its tensors have padded rows."""

    layer_id: int
    # With `rotary`, these three may be S float32 partial sums, with a first dimension of S.
    query: Tensor  # [M*, num_heads, head_dim]
    key: Tensor | None  # [M*, num_kv_heads, head_dim]
    value: Tensor | None  # [M*, num_kv_heads, head_dim_v]
    output: Tensor  # [M*, num_heads, head_dim_v], read by the next segment
    rotary: Rotary | None  # the rotation that belongs to the call

    def run(self, state: AttentionState, num_tokens: int) -> None:
        query, key, value = (
            None if heads is None else heads[..., :num_tokens, :, :]
            for heads in (self.query, self.key, self.value)
        )
        assert query is not None
        output = self.output[:num_tokens]
        if self.rotary is None:
            output.copy_(state.attend(self.layer_id, query, key, value))
        else:
            state.rotate_and_attend(self.layer_id, query, key, value, self.rotary, output)
        # A longer batch may have left NaN in the padded rows, which MoE layers would spread.
        if num_tokens < self.output.shape[0]:
            self.output[num_tokens:].zero_()


@dataclass(frozen=True)
class _RecurrentCut:
    """One eager call of a recurrent layer between two segments; its tensors have padded rows."""

    layer_id: int
    x: Tensor  # [M*, channels]
    weights: DeltaWeights
    gate: OutputGate
    output: Tensor  # [M*, value size], read by the next segment

    def run(self, state: AttentionState, num_tokens: int) -> None:
        gate = replace(self.gate, values=self.gate.values[:num_tokens])
        result = state.recur(self.layer_id, self.x[:num_tokens], self.weights, gate)
        self.output[:num_tokens].copy_(result)
        self.output[num_tokens:].zero_()  # as after attention


class BreakableGraph:
    """The segments of one descriptor and the attention calls between them."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._steps: list[Graph | _AttentionCut | _RecurrentCut] = []
        self._open: Graph | None = None

    def record(self, forward: Callable[[AttentionState], Any], state: AttentionState) -> Any:
        """Record `forward` and return its result. `state` provides shapes; no attention is run."""
        self._begin()
        try:
            return forward(
                BreakableState(
                    state.metadata,
                    state.layers,
                    state.group_of_layer,
                    state.kv_caches,
                    state.recurrent,
                    graph=self,
                )
            )
        finally:
            self._end()

    def cut(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        width: int,
        rotary: Rotary | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """End the segment, note the attention call and begin the next segment.

        Returns the tensor for attention's output, [M*, num_heads, width], in `dtype` (None = the
        query's).
        """
        # Allocated inside the segment, so that the pool keeps its address for the next one.
        output = query.new_empty(*query.shape[-3:-1], width, dtype=dtype or query.dtype)
        self._end()
        borrow = self._pool.backend.borrow
        self._steps.append(
            _AttentionCut(
                layer_id,
                borrow(query),
                None if key is None else borrow(key),
                None if value is None else borrow(value),
                borrow(output),
                None if rotary is None else replace(rotary, positions=borrow(rotary.positions)),
            )
        )
        self._begin()
        return output

    def cut_recurrent(
        self, layer_id: int, x: Tensor, weights: DeltaWeights, gate: OutputGate, width: int
    ) -> Tensor:
        """The same for a recurrent layer; returns the tensor for its output, [M*, width]."""
        output = x.new_empty(x.shape[0], width)
        self._end()
        borrow = self._pool.backend.borrow
        gate = replace(gate, values=borrow(gate.values))
        self._steps.append(_RecurrentCut(layer_id, borrow(x), weights, gate, borrow(output)))
        self._begin()
        return output

    def replay(self, state: AttentionState, num_tokens: int) -> None:
        """Run all segments, and attention between them with `state` on the first `num_tokens`
        rows."""
        for step in self._steps:
            if isinstance(step, _AttentionCut | _RecurrentCut):
                step.run(state, num_tokens)
            else:
                step.replay()

    def reset(self) -> None:
        for step in self._steps:
            if not isinstance(step, _AttentionCut | _RecurrentCut):
                step.reset()
        self._steps.clear()

    def _begin(self) -> None:
        self._open = self._pool.backend.begin(self._pool.handle)

    def _end(self) -> None:
        assert self._open is not None
        graph, self._open = self._open, None
        self._pool.backend.end(graph)
        self._steps.append(graph)


@dataclass(frozen=True)
class BreakableState(AttentionState):
    """An `AttentionState` that cuts the graph being recorded wherever a layer attends."""

    graph: BreakableGraph = field(kw_only=True)

    def attend(
        self, layer_id: int, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        layer = self.layers[layer_id]
        width = layer.head_dim if layer.head_dim_v is None else layer.head_dim_v
        return self.graph.cut(layer_id, query, key, value, width)

    def recur(self, layer_id: int, x: Tensor, weights: DeltaWeights, gate: OutputGate) -> Tensor:
        assert self.recurrent is not None
        width = self.recurrent.shapes[layer_id].value_size
        return self.graph.cut_recurrent(layer_id, x, weights, gate, width)

    def rotate_and_attend(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        dtype = self.layers[layer_id].dtype_of(self.kv_caches[layer_id])
        if key is not None and self.metadata[self.group_of_layer[layer_id]].fuses_rotation:
            width = self.layers[layer_id].head_dim
            return self.graph.cut(layer_id, query, key, value, width, rotary, dtype)
        # Recorded in the segment before the cut.
        query, key, value = rotary.prepare(query, key, value, dtype)
        return self.attend(layer_id, query, key, value)
