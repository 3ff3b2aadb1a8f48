"""Runs the target's forward pass over the step buffers: eagerly, in pieces, or as one graph.

A pass is a function of (descriptor, step buffers, attention state). Graphs write their outputs to
buffers that outlive the replay. If attention allows, the FULL graph of a uniform batch also gathers
its rows and builds its attention, so that the whole pass is one replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode, StepMode
from ..attention.base import (
    AttentionBuilder,
    AttentionState,
    AttentionStatePair,
    CommonAttentionMetadata,
)
from ..attention.recurrent import RecurrentMetadata
from ..batch.input_batch import InputBatch, InputBuffers
from ..batch.kv_cache import KVCache
from ..batch.recurrent_states import RecurrentStates
from ..batch.request_table import RequestTable
from ..graphs.dispatch import descriptors, eager_descriptor, resolve_target
from ..graphs.manager import CaptureReport, CudaGraphManager
from ..graphs.settings import GraphSettings
from ..models.base import has_native_head, run_alone
from ..models.short_model import ShortPass
from ..sampling.row_sampling import PickTokens

# hidden states [M*, H]; auxiliary hidden states side by side [M*, boundaries * H], if any
ForwardOutput = tuple[Tensor, Tensor | None]


class TargetModel(Protocol):
    """The interface of the models in `runner.models`."""

    def __call__(
        self,
        input_ids: Tensor,  # [M*] int32
        positions: Tensor,  # [M*] int64
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,  # tensors for the results
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
        states: RecurrentStates | None = None,  # None: the model has no recurrent layers
    ) -> None:
        self.states = states
        self.cache = cache
        self.model = model
        self.builders = builders
        self._buffers = buffers
        self._graphs = graphs
        self._aux_boundaries = aux_boundaries
        on_device = graphs is not None and all(builder.builds_on_device for builder in builders)
        self._table = table if on_device else None
        self._short_pass = ShortPass(model)
        fmt = getattr(model, "format", None)
        self._on_cpu_alone = fmt is not None and fmt.batch_invariant and fmt.device.type == "cpu"
        # Of graphs: hidden states, then auxiliary hidden states; [max M*, .] each.
        self._outputs: list[Tensor] = []

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[L, H] -> [L, V]"""
        if self._on_cpu_alone and not has_native_head(self.model):
            rows = [self.model.compute_logits(row.clone()) for row in torch.split(hidden_states, 1)]
            return torch.cat(rows)
        return self.model.compute_logits(hidden_states)

    @property
    def pick_tokens(self) -> PickTokens | None:
        """The model's function that picks tokens without writing logits, if it has one."""
        picks: PickTokens | None = getattr(self.model, "pick_tokens", None)
        return picks

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        best: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> BatchExecutionDescriptor:
        """The descriptor of a batch of these sizes; `best` limits the mode."""
        if self._graphs is None:
            return eager_descriptor(num_tokens, num_reqs, uniform_token_count)
        if best is CUDAGraphMode.FULL:
            return self._graphs.dispatch(num_tokens, num_reqs, uniform_token_count)
        return self._graphs.dispatch(num_tokens, num_reqs, uniform_token_count, best)

    def step_mode(self, desc: BatchExecutionDescriptor) -> StepMode:
        """The mode of a step with this descriptor."""
        if desc.mode is not CUDAGraphMode.FULL:
            is_eager = desc.mode is CUDAGraphMode.NONE
            return StepMode.EAGER if is_eager else StepMode.PIECEWISE
        is_whole = self._table is not None and desc.uniform_token_count is not None
        return StepMode.WHOLE if is_whole else StepMode.FORWARD

    def outputs(self, desc: BatchExecutionDescriptor) -> ForwardOutput:
        """The tensors that a graph of this descriptor writes its outputs to."""
        return self._outputs_of(desc.num_tokens)

    def _outputs_of(self, num_tokens: int) -> ForwardOutput:
        hidden, *aux_hidden = (output[:num_tokens] for output in self._outputs)
        return hidden, aux_hidden[0] if aux_hidden else None

    def build_attention(self, batch: InputBatch) -> AttentionState:
        """Build this step's attention state; for a FULL graph, update its buffers in place."""
        common: Sequence[CommonAttentionMetadata] = batch.common
        if batch.mode is StepMode.PIECEWISE:
            # Attention runs between the pieces, on the real rows.
            common = [group.with_rows(batch.num_reqs, batch.num_tokens) for group in common]
        return self._state(common, batch.descriptor)

    def _state(
        self, common: Sequence[CommonAttentionMetadata], desc: BatchExecutionDescriptor
    ) -> AttentionState:
        metadata = [b.build(c, desc) for b, c in zip(self.builders, common, strict=True)]
        return self.cache.attention_state(metadata, self._recurrent(common, desc))

    def _recurrent(
        self, common: Sequence[CommonAttentionMetadata], desc: BatchExecutionDescriptor
    ) -> RecurrentMetadata | None:
        """Prepare the rows of recurrent layers."""
        if self.states is None:
            return None
        rows, for_graph = common[0], desc.mode is CUDAGraphMode.FULL
        return self.states.builder.build(
            self._buffers,
            rows.num_reqs,
            rows.num_actual_tokens,
            rows.query_start_loc_cpu,
            for_graph,
        )

    def run(self, batch: InputBatch, state: AttentionState | None) -> ForwardOutput:
        """Run the batch in the step buffers; `state` is None in a WHOLE step."""

        def eager() -> None:  # for --debug-compare-eager; into the same outputs
            is_piecewise = batch.mode is StepMode.PIECEWISE
            rows = batch.num_tokens if is_piecewise else batch.descriptor.num_tokens
            self._forward_into_outputs(rows, self.build_attention(batch))

        if self.states is not None and not self.states.builder.repeats(
            batch.common[0].max_query_len
        ):
            return self._run(batch.descriptor, state, batch.num_tokens, None)
        return self._run(batch.descriptor, state, batch.num_tokens, eager)

    def run_dummy(self, desc: BatchExecutionDescriptor) -> AttentionState | None:
        """Run a pass without requests on a rank that has no work while others have; writes no KV.

        A WHOLE step's graph reads from the step buffers that all of its rows are padding, and
        builds its attention itself. For other passes the tables and lengths in the step buffers,
        which still hold the last batch, are reset. Returns the attention state for the drafter's
        part of the same step; None in a WHOLE step.
        """
        state: AttentionState | None = None
        if self.step_mode(desc) is StepMode.WHOLE:
            assert desc.uniform_token_count is not None
            self._buffers.place([], [], desc, desc.uniform_token_count)
        else:
            state = self._state(self._buffers.fill_dummy(desc), desc)
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
        """Run `num_tokens` dummy rows, spread over as many requests as possible; writes no KV.

        Returns the logits of a row for each request.
        """
        num_reqs = min(num_tokens, max_num_reqs or self._buffers.max_num_reqs)
        common = self._buffers.fill_dummy(eager_descriptor(num_tokens, num_reqs, None))
        attention = self.eager_attention(num_tokens, common)
        return self.compute_logits(self.run_eagerly(num_tokens, attention)[:num_reqs])

    def eager_attention(
        self, num_tokens: int, common: Sequence[CommonAttentionMetadata]
    ) -> AttentionState:
        """The attention of the first `num_tokens` rows of the step buffers, outside graphs."""
        return self._state(common, eager_descriptor(num_tokens, common[0].num_reqs, None))

    def run_eagerly(self, num_tokens: int, attention: AttentionState) -> Tensor:
        """Run the first `num_tokens` rows of the step buffers; returns hidden states [M, H]."""
        return self._forward(num_tokens, attention)[0]

    def capture(self) -> Mapping[BatchExecutionDescriptor, AttentionStatePair]:
        """Capture every wanted graph; returns the attention states of each."""
        if self._graphs is None or not self._graphs.wanted:
            return {}
        return self._graphs.capture(self.create_forward_fn)

    @property
    def capture_report(self) -> CaptureReport | None:
        """The report of the last capture; None without graphs."""
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

        def warm_up(state: AttentionState) -> list[Tensor]:  # runs one layer of each kind
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
        return self.cache.attention_state(metadata, self._recurrent(common, desc))

    def _forward(
        self, num_tokens: int, state: AttentionState, into: ForwardOutput | None = None
    ) -> ForwardOutput:
        ids, positions = self._buffers.input_ids, self._buffers.positions
        args = (ids[:num_tokens], positions[:num_tokens], state, self._aux_boundaries)
        if self._on_cpu_alone:
            assert into is None, "a CPU has no graphs"
            return run_alone(self.model, *args)
        return self.model(*args) if into is None else self.model(*args, into)

    def _forward_into_outputs(self, num_tokens: int, state: AttentionState) -> list[Tensor]:
        self._forward(num_tokens, state, self._outputs_of(num_tokens))
        return [output[:num_tokens] for output in self._outputs]

    def _allocate_outputs(self) -> None:
        """Allocate the outputs before the first capture, since they outlive replays."""
        desc = eager_descriptor(1, 1, 1)
        common = self._buffers.fill_dummy(desc)
        results = self._forward(1, self._state(common, desc))
        rows = self._buffers.max_num_tokens
        self._outputs = [
            torch.empty((rows, t.shape[1]), dtype=t.dtype, device=t.device)
            for t in results
            if t is not None
        ]


logger = logging.getLogger(__name__)


class Claims(Protocol):
    """A builder of attention or of recurrent layers."""

    supports: AttentionCGSupport


def create_target_graphs(
    settings: GraphSettings | None,
    wanted: CUDAGraphMode,
    builders: Sequence[Claims],
    query_lengths: Sequence[int],  # of uniform batches, ascending
    max_num_reqs: int,
    max_num_tokens: int,
) -> tuple[CudaGraphManager | None, CUDAGraphMode]:
    """The target's graph manager and its mode; (None, NONE) without graphs."""
    if settings is None:
        return None, CUDAGraphMode.NONE
    support = min(builder.supports for builder in builders)
    decision = resolve_target(wanted, support, query_lengths)
    if decision.reason:
        by_default = wanted is CUDAGraphMode.FULL_AND_FULL
        level = logging.INFO if by_default else logging.WARNING
        logger.log(level, "target graphs run as %s: %s", decision.mode.name, decision.reason)
    is_whole = decision.mode.mixed_mode() is CUDAGraphMode.FULL
    wanted_graphs = descriptors(
        decision.mode,
        decision.uniform_token_counts,
        settings.sizes,
        max_num_reqs,
        max_num_tokens,
        settings.whole_mixed_sizes if is_whole else settings.mixed_sizes,
    )
    return settings.manager("target", wanted_graphs), decision.mode
