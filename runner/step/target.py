"""The target model's forward pass over the step buffers: eager, in pieces, or as one graph.

A pass is a function of (descriptor, step buffers, attention state). Outputs of graphs are copied,
inside the graph, to buffers that outlive a replay. Where attention allows, the FULL graph of a
uniform batch also gathers its rows and builds its attention, so that a step is one replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode, StepMode
from ..attention.base import (
    AttentionBuilder,
    AttentionState,
    AttentionStatePair,
    CommonAttentionMetadata,
)
from ..batch.input_batch import InputBatch, InputBuffers
from ..batch.kv_cache import KVCache
from ..batch.request_table import RequestTable
from ..graphs.dispatch import eager_descriptor
from ..graphs.manager import CaptureReport, CudaGraphManager
from ..models.short_model import ShortPass
from ..sampling.row_sampling import PickTokens

# hidden states [M*, H] and taps side by side [M*, taps * H], None if there are none
ForwardOutput = tuple[Tensor, Tensor | None]


class TargetModel(Protocol):
    """What a model of `runner.models` offers."""

    def __call__(
        self,
        input_ids: Tensor,  # [M*] int32
        positions: Tensor,  # [M*] int64
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,  # where the results go
    ) -> ForwardOutput: ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor: ...


class Target:
    """Model, KV cache, attention builders and graphs of the target."""

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        builders: Sequence[AttentionBuilder],  # by KV group
        buffers: InputBuffers,
        graphs: CudaGraphManager | None = None,
        aux_boundaries: tuple[int, ...] = (),
        table: RequestTable | None = None,  # given: graphs of uniform batches gather from it
    ) -> None:
        self.cache = cache
        self.model = model
        self.builders = builders
        self._buffers = buffers
        self._graphs = graphs
        self._aux_boundaries = aux_boundaries
        on_device = graphs is not None and all(builder.builds_on_device for builder in builders)
        self._table = table if on_device else None
        self._short_pass = ShortPass(model)
        self._outputs: list[Tensor] = []  # hidden states, then taps; [max M*, .], with graphs only

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[L, H] -> [L, V]"""
        return self.model.compute_logits(hidden_states)

    @property
    def pick_tokens(self) -> PickTokens | None:
        """The model's way to pick tokens without writing logits, if it has one."""
        picks: PickTokens | None = getattr(self.model, "pick_tokens", None)
        return picks

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        best: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> BatchExecutionDescriptor:
        """How a batch of these sizes runs; `best` caps the mode."""
        if self._graphs is None:
            return eager_descriptor(num_tokens, num_reqs, uniform_token_count)
        if best is CUDAGraphMode.FULL:
            return self._graphs.dispatch(num_tokens, num_reqs, uniform_token_count)
        return self._graphs.dispatch(num_tokens, num_reqs, uniform_token_count, best)

    def step_mode(self, desc: BatchExecutionDescriptor) -> StepMode:
        """How a step of this descriptor runs."""
        if desc.mode is not CUDAGraphMode.FULL:
            is_eager = desc.mode is CUDAGraphMode.NONE
            return StepMode.EAGER if is_eager else StepMode.PIECEWISE
        is_whole = self._table is not None and desc.uniform_token_count is not None
        return StepMode.WHOLE if is_whole else StepMode.FORWARD

    def outputs(self, desc: BatchExecutionDescriptor) -> ForwardOutput:
        """What a graph of this descriptor leaves behind."""
        return self._outputs_of(desc.num_tokens)

    def _outputs_of(self, num_tokens: int) -> ForwardOutput:
        hidden, *taps = (output[:num_tokens] for output in self._outputs)
        return hidden, taps[0] if taps else None

    def build_attention(self, batch: InputBatch) -> AttentionState:
        """This step's attention; with a FULL graph, what its buffers hold is updated in place."""
        common: Sequence[CommonAttentionMetadata] = batch.common
        if batch.mode is StepMode.PIECEWISE:
            # Attention runs between the pieces, on the real rows.
            common = [group.with_rows(batch.num_reqs, batch.num_tokens) for group in common]
        metadata = [
            builder.build(group, batch.descriptor)
            for builder, group in zip(self.builders, common, strict=True)
        ]
        return self.cache.attention_state(metadata)

    def run(self, batch: InputBatch, state: AttentionState | None) -> ForwardOutput:
        """The forward pass of the batch in the step buffers; no state in a WHOLE step."""

        def eager() -> None:  # for --debug-compare-eager; into the same outputs
            is_piecewise = batch.mode is StepMode.PIECEWISE
            rows = batch.num_tokens if is_piecewise else batch.descriptor.num_tokens
            self._forward_into_outputs(rows, self.build_attention(batch))

        return self._run(batch.descriptor, state, batch.num_tokens, eager)

    def run_dummy(self, desc: BatchExecutionDescriptor) -> AttentionState:
        """The forward pass of a rank that has no work where others have; no KV is written.

        Tables and lengths in the step buffers are written anew: those of the last real batch are
        stale. Returns the attention state, for the drafter's part of the same step.
        """
        common = self._buffers.fill_dummy(desc)
        state = self.cache.attention_state(
            [b.build(group, desc) for b, group in zip(self.builders, common, strict=True)]
        )
        self._run(desc, state, desc.num_tokens, None)
        return state

    def _run(
        self,
        desc: BatchExecutionDescriptor,
        state: AttentionState | None,
        num_tokens: int,
        eager: Callable[[], None] | None,
    ) -> ForwardOutput:
        if desc.mode is CUDAGraphMode.FULL and (state is None or state.can_replay):
            assert self._graphs is not None
            assert state is not None or self.step_mode(desc) is StepMode.WHOLE
            self._graphs.run_fullgraph(desc, eager)
            return self.outputs(desc)
        assert state is not None
        if desc.mode is CUDAGraphMode.NONE:
            return self._forward(desc.num_tokens, state)
        if desc.mode is CUDAGraphMode.FULL:
            self._forward_into_outputs(desc.num_tokens, state)
        else:
            assert self._graphs is not None
            self._graphs.run_piecewise(desc, state, num_tokens, eager)
        return self.outputs(desc)

    def warm_up(self, num_tokens: int = 1, max_num_reqs: int | None = None) -> Tensor:
        """Run `num_tokens` dummy rows, one a request as far as there may be so many, without
        touching the KV; returns logits."""
        num_reqs = min(num_tokens, max_num_reqs or self._buffers.max_num_reqs)
        desc = eager_descriptor(num_tokens, num_reqs, None)
        common = self._buffers.fill_dummy(desc)
        metadata = [b.build(c, desc) for b, c in zip(self.builders, common, strict=True)]
        hidden, _ = self._forward(num_tokens, self.cache.attention_state(metadata))
        return self.compute_logits(hidden[:num_reqs])

    def capture(self) -> Mapping[BatchExecutionDescriptor, AttentionStatePair]:
        """Capture every wanted graph; empty where none is wanted."""
        if self._graphs is None or not self._graphs.wanted:
            return {}
        return self._graphs.capture(self.create_forward_fn)

    @property
    def capture_report(self) -> CaptureReport | None:
        """What was captured; None without graphs."""
        return None if self._graphs is None else self._graphs.report

    def create_forward_fn(self, desc: BatchExecutionDescriptor, warmup: bool) -> tuple[Any, Any]:
        """`CreateForwardFn` of the graph manager: dummy rows and fresh attention metadata."""
        if not self._outputs:
            self._allocate_outputs()
        common = self._buffers.fill_dummy(desc)

        def forward(state: AttentionState) -> list[Tensor]:
            if self._table is not None and self.step_mode(desc) is StepMode.WHOLE:
                self._buffers.gather_placed(self._table, desc)
                state = self._state_for_capture(common, desc)
            return self._forward_into_outputs(desc.num_tokens, state)

        def warm_up(state: AttentionState) -> list[Tensor]:  # each kind of layer, not each layer
            with self._short_pass.running():
                return forward(state)

        return warm_up if warmup else forward, self._state_for_capture(common, desc)

    def _state_for_capture(
        self, common: Sequence[CommonAttentionMetadata], desc: BatchExecutionDescriptor
    ) -> AttentionState:
        metadata = [
            builder.build_for_capture(group, desc)
            for builder, group in zip(self.builders, common, strict=True)
        ]
        return self.cache.attention_state(metadata)

    def _forward(
        self, num_tokens: int, state: AttentionState, into: ForwardOutput | None = None
    ) -> ForwardOutput:
        ids, positions = self._buffers.input_ids, self._buffers.positions
        args = (ids[:num_tokens], positions[:num_tokens], state, self._aux_boundaries)
        return self.model(*args) if into is None else self.model(*args, into)

    def _forward_into_outputs(self, num_tokens: int, state: AttentionState) -> list[Tensor]:
        self._forward(num_tokens, state, self._outputs_of(num_tokens))
        return [output[:num_tokens] for output in self._outputs]

    def _allocate_outputs(self) -> None:
        """Outputs outlive replays: allocated before the first capture, at the largest size."""
        desc = eager_descriptor(1, 1, 1)
        common = self._buffers.fill_dummy(desc)
        metadata = [b.build(c, desc) for b, c in zip(self.builders, common, strict=True)]
        results = self._forward(1, self.cache.attention_state(metadata))
        rows = self._buffers.max_num_tokens
        self._outputs = [
            torch.empty((rows, t.shape[1]), dtype=t.dtype, device=t.device)
            for t in results
            if t is not None
        ]
