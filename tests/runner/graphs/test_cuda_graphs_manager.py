"""The manager: capture order, pool, memory, comparison with eager; and graphs cut at attention."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.runner.attention.base import (
    AttentionLayer,
    AttentionMetadata,
    AttentionState,
    Rotary,
)
from slipstream.runner.graphs.capture import GraphPool, paused_garbage_collector, spare_modules
from slipstream.runner.graphs.dispatch import descriptors
from slipstream.runner.graphs.manager import (
    CudaGraphManager,
    GraphMismatch,
    relative_error,
)
from slipstream.runner.graphs.piecewise import BreakableState

from .recorder import HostReadDuringCapture, RecordedGraphs

pytestmark = pytest.mark.usefixtures("frozen_again")

HIDDEN, HEADS, MAX_TOKENS = 6, 2, 16
LAYERS = {i: AttentionLayer(i, HEADS, 1, HIDDEN // HEADS, scale=1.0) for i in (0, 1)}
PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class PrefixSum(AttentionMetadata):
    """Replaces attention: it mixes the token rows of a request and depends on the step's
    boundaries."""

    def __init__(self, lens: list[int]) -> None:
        self.lens, self.seen = lens, 0

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Any, value: Any, kv_cache: Any
    ) -> Tensor:
        self.seen = query.shape[0]
        assert key is not None and key.shape[0] == query.shape[0]
        rows = query.split(self.lens) if sum(self.lens) == query.shape[0] else [query]
        return torch.cat([row.cumsum(0) for row in rows]) + key


class Model:
    """Two attention layers over persistent buffers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [torch.randn(HIDDEN, HIDDEN) / 3 for _ in range(4)]
        self.input = torch.zeros(MAX_TOKENS, HIDDEN)
        self.output = torch.zeros(MAX_TOKENS, HIDDEN)

    def state(self, lens: list[int]) -> AttentionState:
        cache = torch.empty(0)
        return AttentionState([PrefixSum(lens)], LAYERS, {0: 0, 1: 0}, {0: cache, 1: cache})

    def run(self, num_tokens: int, state: AttentionState) -> Tensor:
        hidden = self.input[:num_tokens]
        for layer in (0, 1):
            query = (hidden @ self.weights[layer]).view(-1, HEADS, HIDDEN // HEADS)
            mixed = state.attend(layer, query, query[:, :1] * 0.5, query[:, :1])
            hidden = hidden + torch.tanh(mixed.flatten(1) @ self.weights[2 + layer])
        return self.output[:num_tokens].copy_(hidden)

    def create_forward_fn(self, desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        return lambda state: self.run(desc.num_tokens, state), self.state([desc.num_tokens])


def piecewise(num_tokens: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(PIECEWISE, num_tokens)


def full(num_tokens: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(FULL, num_tokens, num_tokens, 1)


def test_piecewise_replay_uses_the_steps_own_metadata_on_real_rows() -> None:
    model, graphs = Model(), RecordedGraphs()
    manager = CudaGraphManager("target", [piecewise(12), piecewise(8)], GraphPool(graphs))
    pairs = manager.capture(model.create_forward_fn)
    assert len(graphs.graphs) == 2 * 3  # two attention layers cut the pass into three graphs
    assert pairs[piecewise(8)].captured.metadata[0].seen == 0  # type: ignore[attr-defined]
    for lens in ([8], [3, 2], [1, 1, 1], [7, 4], [2]):
        num_tokens = sum(lens)
        model.input.normal_()
        desc = manager.dispatch(num_tokens, len(lens), None)
        assert desc.mode is PIECEWISE and desc.num_tokens == (8 if num_tokens <= 8 else 12)
        model.input[num_tokens:] = float("nan")  # padded rows never reach attention
        state = model.state(lens)
        manager.run_piecewise(desc, state, num_tokens)
        replayed = model.output[:num_tokens].clone()
        assert torch.equal(replayed, model.run(num_tokens, model.state(lens)))
        assert state.metadata[0].seen == num_tokens  # type: ignore[attr-defined]


class RotatedSum(PrefixSum):
    """Rotates in its own call: here it adds the positions to the sum of the queries' parts."""

    fuses_rotation = True

    def rotate_and_attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        turned = query.sum(0) + rotary.positions[: query.shape[1], None, None]
        result = self.attend(layer, turned, key.sum(0), value, kv_cache)
        return result if out is None else out.copy_(result)


class RotatingModel(Model):
    """The same layers, whose queries and keys are two parts each, beside a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.arange(MAX_TOKENS)

    def state(self, lens: list[int]) -> AttentionState:
        return replace(super().state(lens), metadata=[RotatedSum(lens)])

    def run(self, num_tokens: int, state: AttentionState) -> Tensor:
        hidden, turn = self.input[:num_tokens], Rotary(self.positions[:num_tokens], torch.empty(0))
        for layer in (0, 1):
            query = (hidden @ self.weights[layer]).view(-1, HEADS, HIDDEN // HEADS)
            parts = torch.stack((query, 2 * query))
            mixed = state.rotate_and_attend(layer, parts, parts[..., :1, :], query[:, :1], turn)
            hidden = hidden + torch.tanh(mixed.flatten(1) @ self.weights[2 + layer])
        return self.output[:num_tokens].copy_(hidden)


def test_a_rotation_that_attention_fuses_is_left_to_it() -> None:
    """It gets the real rows of every part and the positions of the step, not of the capture."""
    model, graphs = RotatingModel(), RecordedGraphs()
    manager = CudaGraphManager("target", [piecewise(8)], GraphPool(graphs))
    manager.capture(model.create_forward_fn)
    for lens in ([8], [3, 2]):
        num_tokens = sum(lens)
        model.input.normal_()
        model.positions.random_(50)
        state = model.state(lens)
        manager.run_piecewise(piecewise(8), state, num_tokens)
        replayed = model.output[:num_tokens].clone()
        assert torch.equal(replayed, model.run(num_tokens, model.state(lens)))
        assert state.metadata[0].seen == num_tokens  # type: ignore[attr-defined]


def test_padded_rows_of_attention_are_zero() -> None:
    model, graphs = Model(), RecordedGraphs()
    manager = CudaGraphManager("target", [piecewise(8)], GraphPool(graphs))
    manager.capture(model.create_forward_fn)
    model.input.fill_(float("nan"))
    manager.run_piecewise(piecewise(8), model.state([8]), 8)
    model.input.normal_()
    manager.run_piecewise(piecewise(8), model.state([3]), 3)
    assert model.output[:8].isfinite().all()


def test_breakable_state_is_only_handed_out_under_capture() -> None:
    model, seen = Model(), []

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        def forward(state: AttentionState) -> Tensor:
            seen.append((warmup, isinstance(state, BreakableState)))
            return model.run(desc.num_tokens, state)

        return forward, model.state([desc.num_tokens])

    CudaGraphManager("target", [piecewise(4)], GraphPool(RecordedGraphs())).capture(create)
    assert seen == [(True, False), (False, True)]


def test_capture_order_progress_and_report() -> None:
    model, graphs = Model(), RecordedGraphs()
    calls: list[tuple[CUDAGraphMode, int, bool]] = []
    progress: list[tuple[int, int, str]] = []

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        calls.append((desc.mode, desc.num_tokens, warmup))
        assert not gc.isenabled()
        return model.create_forward_fn(desc, warmup)

    wanted = descriptors(CUDAGraphMode.FULL_AND_PIECEWISE, [1], (2, 4), 4, 16)
    pool = GraphPool(graphs)
    manager = CudaGraphManager("target", wanted, pool, lambda *args: progress.append(args))
    assert manager.dispatch(2, 2, 1).mode is CUDAGraphMode.NONE  # not captured yet
    pairs = manager.capture(create)
    order = [(PIECEWISE, 4), (PIECEWISE, 2), (FULL, 4), (FULL, 2)]
    assert calls == [(mode, size, warm) for mode, size in order for warm in (True, False)]
    assert progress[0] == (0, 4, "target: PIECEWISE 4 tokens")
    assert progress[-2:] == [(3, 4, "target: FULL 2 tokens (2 x 1)"), (4, 4, "target")]
    assert set(pairs) == set(manager.captured)
    assert manager.report.num_graphs == {"PIECEWISE": 2, "FULL": 2}
    assert manager.report.line().startswith("target graphs: 2 PIECEWISE, 2 FULL, up to 4 tokens")
    assert gc.isenabled()


def test_all_managers_share_one_pool_and_profiling_uses_another() -> None:
    model, graphs = Model(), RecordedGraphs()
    pool = GraphPool(graphs)
    managers = [CudaGraphManager(name, [full(4), full(2)], pool) for name in ("target", "draft")]
    with pool.throw_away():
        for manager in managers:
            manager.profile_memory(model.create_forward_fn)
    assert all(not manager.captured for manager in managers)
    profiled = set(graphs.pools_of_graphs)
    graphs.pools_of_graphs.clear()
    for manager in managers:
        manager.capture(model.create_forward_fn)
    assert len(set(graphs.pools_of_graphs)) == 1
    assert profiled.isdisjoint(graphs.pools_of_graphs)


def test_memory_estimate_extrapolates_from_the_second_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, graphs = Model(), RecordedGraphs()
    readings = iter([0, 100, 100, 110])  # the first graph costs 100, the second 10
    monkeypatch.setattr(graphs, "memory_used", lambda: next(readings))
    pool = GraphPool(graphs)
    manager = CudaGraphManager("target", [full(n) for n in (5, 4, 3, 2, 1)], pool)
    with pool.throw_away():
        assert manager.profile_memory(model.create_forward_fn) == 100 + 10 + 3 * 10


def test_debug_compare_finds_a_stale_replay() -> None:
    model, graphs = Model(), RecordedGraphs()
    manager = CudaGraphManager("target", [full(4)], GraphPool(graphs), debug_compare_eager=True)
    manager.capture(model.create_forward_fn)
    model.input.normal_()
    manager.run_fullgraph(full(4), lambda: model.run(4, model.state([4])))
    with pytest.raises(GraphMismatch, match="target graph FULL 4 tokens") as caught:
        manager.run_fullgraph(full(4), lambda: model.run(4, model.state([1, 1, 2])))
    assert caught.value.error > 0.02


def test_without_debug_compare_eager_is_never_run() -> None:
    model = Model()
    manager = CudaGraphManager("target", [full(4)], GraphPool(RecordedGraphs()))
    manager.capture(model.create_forward_fn)
    manager.run_fullgraph(full(4), lambda: pytest.fail("eager ran"))


def test_capture_computes_nothing_and_refuses_host_reads() -> None:
    graphs, value = RecordedGraphs(), torch.ones(3)
    graph = graphs.begin(graphs.create_pool())
    value.add_(1)
    product = value * 3
    graphs.end(graph)
    assert value.tolist() == [1, 1, 1] and product.isnan().all()
    graph.replay()
    graph.replay()
    assert product.tolist() == [9, 9, 9]
    graph = graphs.begin(graphs.create_pool())
    try:
        with pytest.raises(HostReadDuringCapture):
            value.sum().item()
    finally:
        graphs.end(graph)


@pytest.mark.parametrize("inference", [False, True])
def test_conversions_that_copy_are_recorded_and_views_are_not(inference: bool) -> None:
    graphs, value = RecordedGraphs(), torch.arange(6).view(2, 3)
    with torch.inference_mode(inference), torch.no_grad():
        graph = graphs.begin(graphs.create_pool())
        as_float, turned, same = value.float(), value.t().reshape(6), value.long().view(6)
        graphs.end(graph)
    assert len(graph.node_names) == 2
    value.add_(10)
    graph.replay()
    assert as_float.flatten().tolist() == same.tolist() == list(range(10, 16))
    assert turned.tolist() == [10, 13, 11, 14, 12, 15]


def test_a_failing_capture_closes_the_graph() -> None:
    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
        def forward(state: AttentionState) -> None:
            if not warmup:
                raise ValueError("broken model")

        return forward, Model().state([4])

    for desc in (full(4), piecewise(4)):
        manager = CudaGraphManager("target", [desc], GraphPool(RecordedGraphs()))
        with pytest.raises(ValueError, match="broken model"):
            manager.capture(create)
        assert (torch.ones(2) * 2).tolist() == [2, 2]  # nothing is being recorded any more
        assert not manager.captured


def test_paused_garbage_collector_restores() -> None:
    before = gc.get_freeze_count()
    with paused_garbage_collector():
        assert not gc.isenabled()
        with paused_garbage_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_modules_are_spared_by_collections_of_captures_once_and_for_all() -> None:
    gc.unfreeze()  # as in a process that starts
    try:
        spare_modules()
        spared = gc.get_freeze_count()
        assert spared > len(sys.modules)
        later = [[]]  # type: ignore[var-annotated]
        later.append(later)
        spare_modules()
        with paused_garbage_collector():
            pass
        assert gc.get_freeze_count() <= spared  # fewer once some died; none came since
        assert any(each is later for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_relative_error() -> None:
    value = torch.tensor([3.0, 4.0])
    assert relative_error(value, value) == 0
    assert relative_error(value * 1.1, value) == pytest.approx(0.1)
    nan = torch.tensor([3.0, float("nan")])
    assert relative_error(nan, value) == float("inf")
    assert relative_error(nan, nan) == 0


def test_a_pool_whose_graphs_are_gone_is_not_captured_into_again() -> None:
    pool = GraphPool(RecordedGraphs())
    first, second = (CudaGraphManager(name, [], pool) for name in ("first", "second"))
    handle = pool.handle
    pool.add_graphs(2)
    assert pool.handle == handle
    pool.add_graphs(-1)
    assert pool.handle == handle  # another manager's graph still lives in it
    first.reset()
    second.reset()
    assert pool.handle == handle  # they had none
    with pool.throw_away():
        pool.add_graphs(1)
        pool.add_graphs(-1)
    assert pool.handle == handle
    pool.add_graphs(-1)
    assert pool.handle != handle
