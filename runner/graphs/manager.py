"""Captures the graphs of one forward function at start-up, and replays them.

The target, draft prefills, draft decodes and token selection each have a manager; all of them share
one `GraphPool`. A `CreateForwardFn` supplies the function and its attention metadata.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ..attention.base import AttentionState, AttentionStatePair
from .capture import Graph, GraphPool, paused_garbage_collector
from .dispatch import dispatch, eager_descriptor
from .piecewise import BreakableGraph

_TOLERANCE = 2e-2  # of a replay, relative to the eager run

# Runs the model on the persistent step buffers. Tensors that it returns outlive the replay, so it
# must have copied them to memory outside the pool.
ForwardFn = Callable[[AttentionState], Any]
ProgressFn = Callable[[int, int, str], None]  # (done, total, detail)


class CreateForwardFn(Protocol):
    """Creates dummy inputs and *fresh* attention metadata for one descriptor; called twice for
    each.

    With `warmup=True` the result is run eagerly, with `warmup=False` it is recorded. A FULL capture
    records every Python number, so bounds such as max_seq_len must be the largest. In PIECEWISE
    mode requests are not padded, so everything outside attention may depend on token rows only.
    """

    def __call__(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> tuple[ForwardFn, AttentionState]: ...


class GraphMismatch(RuntimeError):
    """With `--debug-compare-eager`: a replay differs from the eager run."""

    def __init__(self, name: str, desc: BatchExecutionDescriptor, error: float) -> None:
        super().__init__(
            f"{name} graph {describe(desc)} differs from its eager run by {error:.2e} (relative)"
        )
        self.error = error


@dataclass(frozen=True)
class CaptureReport:
    """The graphs that one manager captured."""

    name: str
    num_graphs: Mapping[str, int]  # by mode
    largest: int  # token rows
    seconds: float
    memory_bytes: int

    def line(self) -> str:
        kinds = ", ".join(f"{count} {mode}" for mode, count in self.num_graphs.items()) or "none"
        return (
            f"{self.name} graphs: {kinds}, up to {self.largest} tokens, "
            f"{self.seconds:.1f} s, {self.memory_bytes / 2**20:.0f} MiB"
        )


def describe(desc: BatchExecutionDescriptor) -> str:
    """`FULL 24 tokens (6 x 4)`, for logs and progress."""
    uniform = desc.uniform_token_count
    shape = f" ({desc.num_reqs} x {uniform})" if uniform else ""
    return f"{desc.mode.name} {desc.num_tokens} tokens{shape}"


class CudaGraphManager:
    """The graphs of one forward function.

    `wanted` are its descriptors in capture order (`dispatch.descriptors`).
    """

    def __init__(
        self,
        name: str,
        wanted: Sequence[BatchExecutionDescriptor],
        pool: GraphPool,
        progress: ProgressFn | None = None,
        debug_compare_eager: bool = False,
    ) -> None:
        self.name = name
        self.wanted = list(wanted)
        self.report = CaptureReport(name, {}, 0, 0.0, 0)
        self._pool = pool
        self._progress = progress
        self._debug_compare_eager = debug_compare_eager
        self._full: dict[BatchExecutionDescriptor, Graph] = {}
        self._pieces: dict[BatchExecutionDescriptor, BreakableGraph] = {}
        self._outputs: dict[BatchExecutionDescriptor, list[Tensor]] = {}
        # A graph may write its attention plan to its captured state, so that lives as long as the
        # graph. (A graph that gathers builds its state, and its plan, at each replay.)
        self._states: dict[BatchExecutionDescriptor, AttentionStatePair] = {}
        self._dispatched: dict[
            tuple[int, int, int | None, CUDAGraphMode], BatchExecutionDescriptor
        ] = {}

    # --- dispatch ---------------------------------------------------------------------------------

    @property
    def captured(self) -> list[BatchExecutionDescriptor]:
        return [*self._pieces, *self._full]

    def holds(self, desc: BatchExecutionDescriptor) -> bool:
        """Whether `run_fullgraph` can replay this descriptor."""
        return desc in self._full

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        best: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> BatchExecutionDescriptor:
        """The descriptor to run this batch with; an eager one if no graph fits."""
        key = (num_tokens, num_reqs, uniform_token_count, best)
        if not self._full and not self._pieces:
            return eager_descriptor(num_tokens, num_reqs, uniform_token_count)
        if key not in self._dispatched:
            self._dispatched[key] = dispatch(self.captured, *key)
        return self._dispatched[key]

    # --- capture ----------------------------------------------------------------------------------

    def capture(
        self, create_forward_fn: CreateForwardFn
    ) -> dict[BatchExecutionDescriptor, AttentionStatePair]:
        """Warm up and capture every descriptor, PIECEWISE before FULL and largest first.

        Returns the two independent attention states of each descriptor.
        """
        self.reset()
        backend, start = self._pool.backend, time.monotonic()
        used = backend.memory_used()
        with paused_garbage_collector():
            for index, desc in enumerate(self.wanted):
                if self._progress is not None:
                    self._progress(index, len(self.wanted), f"{self.name}: {describe(desc)}")
                self._capture_one(desc, create_forward_fn)
        if self._progress is not None and self.wanted:
            self._progress(len(self.wanted), len(self.wanted), self.name)
        counts: dict[str, int] = {}
        for desc in self.wanted:
            counts[desc.mode.name] = counts.get(desc.mode.name, 0) + 1
        self.report = CaptureReport(
            self.name,
            counts,
            max((desc.num_tokens for desc in self.wanted), default=0),
            time.monotonic() - start,
            max(0, backend.memory_used() - used),
        )
        return dict(self._states)

    def _capture_one(
        self, desc: BatchExecutionDescriptor, create_forward_fn: CreateForwardFn
    ) -> None:
        assert desc not in self._states, "its graph would be lost, and the pool's count be wrong"
        backend = self._pool.backend
        with backend.capturing():
            # The warm-up compiles, autotunes and allocates. It also plans its attention state,
            # which therefore cannot be captured.
            warmup_fn, warmup_state = create_forward_fn(desc, warmup=True)
            warmup_fn(warmup_state)
            backend.synchronize()
            forward, state = create_forward_fn(desc, warmup=False)
            _assert_independent(warmup_state, state)
            backend.synchronize()
            if desc.mode is CUDAGraphMode.PIECEWISE:
                pieces = BreakableGraph(self._pool)
                result = pieces.record(forward, state)
                self._pieces[desc] = pieces
            else:
                graph = backend.begin(self._pool.handle)
                try:
                    result = forward(state)
                finally:
                    backend.end(graph)
                self._full[desc] = graph
        self._pool.add_graphs(1)
        self._states[desc] = AttentionStatePair(warmup_state, state)
        if self._debug_compare_eager:
            self._outputs[desc] = _tensors(result)

    def profile_memory(self, create_forward_fn: CreateForwardFn, num_graphs: int = 2) -> int:
        """Estimate the bytes that `capture` will need from the first graphs of each mode.

        Call it inside `GraphPool.throw_away()`; it leaves nothing captured. The first graph of a
        mode includes the pool, and later ones show the cost of each additional graph.
        """
        backend, total = self._pool.backend, 0
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            all_of_mode = [desc for desc in self.wanted if desc.mode is mode]
            costs = []
            with paused_garbage_collector():
                for desc in all_of_mode[:num_graphs]:
                    used = backend.memory_used()
                    self._capture_one(desc, create_forward_fn)
                    costs.append(max(0, backend.memory_used() - used))
            if costs:
                total += sum(costs) + costs[-1] * (len(all_of_mode) - len(costs))
        self.reset()
        return total

    def reset(self) -> None:
        """Drop all graphs and states."""
        num_graphs = len(self._full) + len(self._pieces)
        for graph in self._full.values():
            graph.reset()
        for pieces in self._pieces.values():
            pieces.reset()
        for kept in (self._full, self._pieces, self._outputs, self._states, self._dispatched):
            kept.clear()
        if num_graphs:
            self._pool.add_graphs(-num_graphs)

    # --- replay -----------------------------------------------------------------------------------

    def run_fullgraph(
        self, desc: BatchExecutionDescriptor, eager: Callable[[], Any] | None = None
    ) -> None:
        """Replay a FULL graph; the attention builders must have updated its buffers before.

        `eager` runs the same step without a graph, with a *fresh* attention state, into the same
        outputs. It is called only with `debug_compare_eager`; a difference raises `GraphMismatch`.
        """
        self._full[desc].replay()
        if self._debug_compare_eager and eager is not None:
            self._compare(desc, eager)

    def run_piecewise(
        self,
        desc: BatchExecutionDescriptor,
        state: AttentionState,
        num_tokens: int,
        eager: Callable[[], Any] | None = None,
    ) -> None:
        """Replay the pieces; attention runs eagerly with this step's `state` on `num_tokens`
        rows."""
        self._pieces[desc].replay(state, num_tokens)
        if self._debug_compare_eager and eager is not None:
            self._compare(desc, eager, num_tokens)

    def _compare(
        self,
        desc: BatchExecutionDescriptor,
        eager: Callable[[], Any],
        num_rows: int | None = None,
    ) -> None:
        replayed = [output[:num_rows].clone() for output in self._outputs[desc]]
        eager()
        for output, before in zip(self._outputs[desc], replayed, strict=True):
            if (error := relative_error(before, output[:num_rows])) > _TOLERANCE:
                raise GraphMismatch(self.name, desc, error)
            output[:num_rows].copy_(before)  # continue with the graph's result


class FreshPair:
    """An `AttentionStatePair` that builds each half when it is read, over new dummy inputs."""

    def __init__(self, desc: BatchExecutionDescriptor, create: CreateForwardFn) -> None:
        self._desc = desc
        self._create = create

    @property
    def warmup(self) -> AttentionState:
        """For the eager run."""
        return self._create(self._desc, warmup=True)[1]

    @property
    def captured(self) -> AttentionState:
        """For the recording."""
        return self._create(self._desc, warmup=False)[1]


class RebuiltStates(Mapping[BatchExecutionDescriptor, FreshPair]):
    """The target's state pairs for a drafter's capture, rebuilt at every look-up.

    Don't reuse saved pairs: later builds may have overwritten the buffers they view (vllm#48261),
    and the plan of a captured state was recorded, not run (vllm#44253).
    """

    def __init__(
        self,
        descs: Sequence[BatchExecutionDescriptor],
        create_forward_fn: CreateForwardFn,  # the target's
    ) -> None:
        self._descs = list(descs)
        self._create = create_forward_fn

    def __getitem__(self, desc: BatchExecutionDescriptor) -> FreshPair:
        if desc not in self._descs:
            raise KeyError(desc)
        return FreshPair(desc, self._create)

    def __iter__(self) -> Iterator[BatchExecutionDescriptor]:
        return iter(self._descs)

    def __len__(self) -> int:
        return len(self._descs)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over all elements; infinite if only one of them has a NaN."""
    got, expected = got.double(), expected.double()
    both_nan = got.isnan() & expected.isnan()
    difference = torch.where(both_nan, 0.0, got - expected)
    if not bool(difference.isfinite().all()):
        return float("inf")
    norm = torch.where(both_nan, 0.0, expected).norm()
    return float(difference.norm() / norm.clamp_min(1e-12))


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def _assert_independent(warmup: AttentionState, captured: AttentionState) -> None:
    """A shared metadata object would already be planned when its capture begins (vllm#42444)."""
    assert warmup is not captured, "warm-up and capture share one attention state"
    shared = {id(metadata) for metadata in warmup.metadata} & {
        id(metadata) for metadata in captured.metadata
    }
    assert not shared, "warm-up and capture share attention metadata"
