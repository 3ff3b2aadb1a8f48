"""Graphs at start-up: claims are tested, nothing is built twice, and captures are reported."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.runner.attention.base import (
    AttentionLayer,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.graphs.manager import FreshPair
from slipstream.runner.step.target import Target
from slipstream.speculators.autoregressive import AutoRegressiveSpeculator

from .all_drafters import Drafters
from .recorded_graphs import (
    TensorBackend,
    TensorBuilder,
    TensorMetadata,
    graph_engine,
    tensor_sizes,
)
from .recorded_proposals import recorded_proposals
from .tiny_engine import prompts

ASKED = prompts(3, seed=2, longest=20)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


class FrozenBuilder(TensorBuilder):
    """Claims everything, but its graphs use the lengths of their capture."""

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> TensorMetadata:
        found = super().build(common, desc)
        return TensorMetadata(
            *(t.clone() for t in (found.starts, found.lens, found.table, found.slots))
        )


class FrozenBackend(TensorBackend):
    name = "frozen"

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> FrozenBuilder:
        return FrozenBuilder(*tensor_sizes(sizes))


def test_a_claim_that_does_not_hold_is_lowered_with_a_log_line_and_a_metric(
    drafters: Drafters, caplog: pytest.LogCaptureFixture
) -> None:
    target, config = drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)
    with recorded_proposals() as wanted, graph_engine(target, config, graphs=False) as engine:
        tokens = engine.run(ASKED, max_tokens=6).tokens
    with (
        caplog.at_level(logging.WARNING, "slipstream"),
        recorded_proposals() as got,
        graph_engine(target, config, claims=True, backend=FrozenBackend(), loop=False) as engine,
    ):
        builders = engine.engine._runner._target.builders  # type: ignore[attr-defined]
        assert [builder.supports for builder in builders] == [AttentionCGSupport.NEVER]
        assert engine.run(ASKED, max_tokens=6).tokens == tokens
        # target with draft prefill, and draft decode, are claims of their own
        assert engine.engine.ready.lowered_claims == ["frozen", "frozen"]
    assert set(engine.replays) == {"claim"} and got == wanted  # nothing but the trials
    lines = [r.getMessage() for r in caplog.records if "attention claims" in r.getMessage()]
    assert sum("frozen attention claims ALWAYS" in line for line in lines) == 2, lines


def test_a_claim_that_holds_is_measured_and_kept(
    drafters: Drafters, caplog: pytest.LogCaptureFixture
) -> None:
    target, config = drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)
    with (
        caplog.at_level(logging.INFO, "slipstream"),
        graph_engine(target, config, claims=True) as engine,
    ):
        engine.run(ASKED, max_tokens=6)
        assert engine.engine.ready.lowered_claims == []
    assert engine.replays["draft loop"] > 2
    # lengths 1 and K + 1; the drafter's layer is of the target's kind
    assert "attention claims: 2 trials of tensor" in caplog.text


def test_without_the_measurement_the_stale_graph_would_serve(drafters: Drafters) -> None:
    """The negative control: the same back end without tests of its claims."""
    target, config = drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)
    with graph_engine(target, config, graphs=False) as engine:
        tokens = engine.run(ASKED, max_tokens=6).tokens
    with graph_engine(target, config, backend=FrozenBackend(), loop=False) as engine:
        assert engine.run(ASKED, max_tokens=6).tokens != tokens


def test_capture_builds_and_runs_each_graph_twice_and_collects_nothing(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: Counter[str] = Counter()

    def counted(owner: Any, name: str, label: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            count[label] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(gc, "collect", "collections")
    counted(Target, "create_forward_fn", "target builds")
    counted(Target, "_forward_into_outputs", "target passes")
    counted(AutoRegressiveSpeculator, "first_pass", "draft prefills")
    counted(AutoRegressiveSpeculator, "decode", "draft decodes")
    config = drafters.speculative("eagle3", 3)
    with graph_engine(drafters.pair("eagle3")[0], config) as engine:
        managers = engine.draft_graphs.managers
        target = engine.engine._runner._target._graphs  # type: ignore[attr-defined]
        sizes = [len(manager.captured) for manager in (target, *managers)]
        wanted, prefills, loops = sizes
    assert sizes == [5, 5, 2]
    assert count["target passes"] == 2 * wanted
    assert count["draft prefills"] == 2 * prefills
    assert count["draft decodes"] == 2 * loops * 2  # two in each loop
    # once for a warm-up, once for a capture, of the target's graph and of the drafter's
    assert count["target builds"] == 2 * (wanted + prefills)
    assert count["collections"] == 0


def test_target_and_drafter_capture_into_one_pool(drafters: Drafters) -> None:
    """A pool of its own would keep the drafter's scratch memory beside the target's."""
    config, mode = drafters.speculative("eagle3", 3), CUDAGraphMode.FULL_AND_PIECEWISE
    for loop in (True, False):
        with graph_engine(drafters.pair("eagle3")[0], config, mode=mode, loop=loop) as engine:
            managers = engine.draft_graphs.managers
            assert len(managers) == 2 and all(manager.captured for manager in managers)
            pools = engine.backend.pools_of_graphs
            assert len(pools) > sum(len(manager.captured) for manager in managers)
            assert set(pools) == {pools[0]}


def test_draft_prefill_warms_up_on_one_half_of_a_pair_and_is_captured_on_the_other(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured half's plan is recorded, not run: an eager pass over it would read garbage."""
    given: list[tuple[str, Any]] = []  # (half, state) in the order in which capture asks for them
    used: list[Any] = []

    def watched(half: str) -> property:
        build = getattr(FreshPair, half).fget

        def read(self: FreshPair) -> Any:
            given.append((half, build(self)))
            return given[-1][1]

        return property(read)

    for half in ("warmup", "captured"):
        monkeypatch.setattr(FreshPair, half, watched(half))
    forward = AutoRegressiveSpeculator.first_pass

    def noted(self: Any, num_tokens: int, num_rows: int, attention: Any, *rest: Any) -> None:
        used.append(attention)
        forward(self, num_tokens, num_rows, attention, *rest)

    monkeypatch.setattr(AutoRegressiveSpeculator, "first_pass", noted)
    with graph_engine(drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)) as engine:
        prefills = engine.draft_graphs.managers[0].captured
    assert [half for half, _ in given] == ["warmup", "captured"] * len(prefills)
    assert len(prefills) > 2 and len(used) == len(given)
    assert all(state is wanted for state, (_, wanted) in zip(used, given, strict=True))


def test_startup_says_what_was_captured_and_where_memory_and_time_went(
    drafters: Drafters, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "slipstream"),
        graph_engine(drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)) as engine,
    ):
        seconds = engine.engine.ready.startup_seconds
    lines = [record.getMessage() for record in caplog.records]
    for name, graphs in [("target", 5), ("draft prefill", 5), ("draft decodes x 2", 2)]:
        assert any(line.startswith(f"{name} graphs: {graphs} FULL, up to ") for line in lines)
    memory = next(line for line in lines if line.startswith("memory: "))
    for purpose in ("weights", "workspaces", "KV cache", "request table", "graphs"):
        assert f"{purpose} " in memory
    started = next(line for line in lines if line.startswith("started in "))
    assert {"load", "attention", "kv_cache", "warm_up", "capture"} <= set(seconds)
    assert all(f"{phase} " in started for phase in seconds)


def test_memory_of_the_kv_cache_is_counted_exactly(drafters: Drafters) -> None:
    with graph_engine(drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)) as engine:
        cache = engine.engine._runner._target.cache  # type: ignore[attr-defined]
    tensors = {id(t): t for t in cache.kv_caches.values() if isinstance(t, torch.Tensor)}
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("loop", [False, True])
def test_what_buffers_hold_before_a_capture_reaches_no_request(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    """The warm-up of each of the drafter's graphs runs on rows of no request."""
    config = drafters.speculative("eagle3", 3, draft_sampling="probabilistic")
    captured: Counter[str] = Counter()
    for name in ("_create_prefill", "_create_decode", "_create_loop"):
        create = getattr(DraftGraphs, name)

        def after_a_step(
            self: Any, *args: Any, name: str = name, create: Any = create, warmup: bool
        ) -> Any:
            drafter = self.speculator
            drafter.idx_mapping.fill_(1)
            drafter.write_positions.fill_(5)
            drafter.seq_lens.fill_(6)
            drafter._all_greedy = True
            captured[name] += 1
            made = create(self, *args, warmup=warmup)
            assert not drafter._all_greedy, "the graph would not draw"
            return made

        monkeypatch.setattr(DraftGraphs, name, after_a_step)
    with graph_engine(
        drafters.pair("eagle3")[0], config, mode=CUDAGraphMode.FULL, loop=loop
    ) as engine:
        engine.run(ASKED, max_tokens=4)
        engine.synchronize()
        kv = engine.engine._runner._target.cache.kv_caches.values()  # type: ignore[attr-defined]
        held = [engine.table.draft_tokens, engine.table.draft_logits, *kv]
        before = [tensor.clone() for tensor in held]
        captured.clear()
        engine.engine._runner.capture()
        assert all(map(torch.equal, held, before))
    assert set(captured) == {"_create_prefill", "_create_loop" if loop else "_create_decode"}
