"""Drafters after WHOLE steps: the same texts and drafts, and no launches outside graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.configs.graphs import BatchExecutionDescriptor, StepMode
from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.attention.base import (
    AttentionLayer,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams
from slipstream.speculators.autoregressive import AutoRegressiveSpeculator

from ..cases import some
from ..runner.graphs.recorder import RecordedGraph
from .all_drafters import Drafters
from .recorded_graphs import (
    GraphEngine,
    TensorBackend,
    TensorBuilder,
    TensorMetadata,
    graph_engine,
    tensor_sizes,
)
from .recorded_proposals import Proposals, recorded_proposals
from .tiny_engine import prompts

ASKED = prompts(6, seed=4, longest=14)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def mixed_life(engine: GraphEngine) -> dict[str, list[int]]:
    """Greedy, seeded and other requests of several lengths and caps; one is aborted."""
    options: list[dict[str, Any]] = [
        {"top_p": 0.9, "temperature": 0.7, "has_own_seed": True},
        {"temperature": 0.8, "has_own_seed": True},
        {"speculative_max_tokens": 1, "temperature": 1.0},
        {},
        {"speculative_enabled": False},
        {"frequency_penalty": 0.4},
    ]
    engine.engine.handle(
        [
            AddRequest(
                str(i),
                prompt,
                SamplingParams(**({"temperature": 0.0} | more), seed=i, max_tokens=5 + 3 * i),
            )
            for i, (prompt, more) in enumerate(zip(ASKED, options, strict=True))
        ]
    )  # fmt: skip
    tokens: dict[str, list[int]] = {}
    steps = 0
    while engine.engine.has_work():
        for step in engine.engine.step():
            for output in step.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
        if steps == 6:
            engine.engine.handle([AbortRequests(["5"])])
    engine.synchronize()
    tokens.pop("5", None)
    return tokens


@pytest.mark.parametrize(
    ("method", "k", "sampling"),
    some(
        [("eagle3", 3, "probabilistic"), ("draft_model", 3, "greedy"), ("eagle3", 1, "greedy")],
        kept=[("eagle3", 3, "probabilistic"), ("eagle3", 1, "greedy")],
    ),
)
def test_text_and_drafts_are_those_of_plain_steps(
    drafters: Drafters, method: str, k: int, sampling: str
) -> None:
    config = drafters.speculative(method, k, watchdog=False, draft_sampling=sampling)
    found: list[tuple[dict[str, list[int]], Proposals]] = []
    for whole in (False, True):
        graph = {"cudagraph_whole_step": whole}
        with graph_engine(drafters.pair(method)[0], config, graph=graph) as engine:
            with recorded_proposals() as seen:
                tokens = mixed_life(engine)
        replays = engine.replays
        assert bool(replays.get("token selection")) == whole
        assert bool(replays.get("draft rejection")) == whole
        if whole:  # some steps contain requests with other options
            assert replays["token selection"] < replays["target"]
        found.append((tokens, [(known, drafts) for known, drafts in seen if drafts]))
    assert found[0][0] == found[1][0]
    assert {len(text) for text in found[0][0].values()} >= {5, 8, 11, 14}
    # The table's drafts are compared by the texts; here are the drafts of requests without a cap.
    plain = {tuple(known): drafts for known, drafts in found[0][1]}
    shared = [(plain[tuple(k)], d) for k, d in found[1][1] if tuple(k) in plain and -1 not in d]
    assert len(shared) > 10 and all(theirs == mine for theirs, mine in shared)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of operations outside replays, except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.replaying:
            outputs = result if isinstance(result, list | tuple) else [result]
            storages = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            made = [t for t in outputs if isinstance(t, Tensor)]
            is_view = all(t.untyped_storage().data_ptr() in storages for t in made)
            if func._schema.is_mutable or not is_view:
                self.names.append(str(func))
        return result


@contextmanager
def launches(engine: GraphEngine, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operations that steps launch outside replays, on this thread."""
    mode = _Launches()
    replay = RecordedGraph.replay

    def seen(self: RecordedGraph) -> None:
        mode.replaying = True
        replay(self)
        mode.replaying = False

    runner: Any = engine.engine._runner
    runner.synchronize()
    patch.setattr(RecordedGraph, "replay", seen)
    patch.setattr(runner._queue, "_executor", None)
    with mode:
        yield mode.names


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_a_steady_step_launches_graphs_and_one_copy(
    drafters: Drafters, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SpeculativeConfig(num_speculative_tokens=1)
    if method is not None:
        config = drafters.speculative(method, 3)
    target = drafters.pair(method or "eagle3")[0]
    with graph_engine(target, config) as engine:
        engine.engine.handle(
            [
                AddRequest(
                    str(i),
                    ASKED[i],
                    SamplingParams(i, 60, temperature=0.7 * i, has_own_seed=True),
                )
                for i in range(2)
            ]
        )  # fmt: skip
        for _ in range(8):
            engine.engine.step()
        executor = engine.engine._runner._queue._executor  # type: ignore[attr-defined]
        counts = []
        with launches(engine, monkeypatch) as names:
            before = dict(engine.replays)
            for _ in range(6):
                del names[:]
                engine.engine.step()
                counts.append(list(names))
        engine.engine._runner._queue._executor = executor  # type: ignore[attr-defined]
        steps = engine.replays["token selection"] - before["token selection"]
        assert steps == 6
        each = {name: engine.replays[name] - before[name] for name in before}
        kinds = {"target", "token selection"}
        assert {name for name, count in each.items() if count} == kinds | (
            {"draft prefill", "draft loop"} if method else set()
        )
        assert set(each.values()) == {6}
        # A step's results are cloned on the CPU, where there is no copy to the host, and unpacked.
        # Some steps bring new blocks: one scatter.
        quiet = [found for found in counts if not any("index" in name for name in found)]
        assert len(quiet) >= 2
        for found in quiet:
            assert set(found) <= {"aten.clone.default", "aten.to.dtype"}, found


def test_the_drafter_stages_no_step_that_a_graph_reads(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = {False: 0, True: 0}
    stage = AutoRegressiveSpeculator.stage

    def seen(self: Any, inputs: Any) -> None:
        staged[inputs.mode is StepMode.WHOLE] += 1
        stage(self, inputs)

    monkeypatch.setattr(AutoRegressiveSpeculator, "stage", seen)
    with graph_engine(drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3)) as engine:
        captured = staged[True]
        assert captured and not staged[False]
        engine.run(ASKED[:2], max_tokens=12)
        assert staged[True] == captured  # in graphs alone
        assert 0 < staged[False] < engine.replays["target"]  # prompts


def test_a_request_that_ends_its_context_keeps_no_draft_beyond_it(drafters: Drafters) -> None:
    """The drafter has 20 positions, the target more."""
    config = drafters.speculative("eagle3", 3, max_model_len=20)
    for whole in (False, True):
        graph = {"cudagraph_whole_step": whole}
        with graph_engine(drafters.pair("eagle3")[0], config, graph=graph) as engine:
            run = engine.run([list(range(1, 13))], max_tokens=12)
            if not whole:
                expected, drafted = run.tokens, run.drafted
            assert engine.table.draft_tokens.max() == -1  # the last steps made none
    assert run.tokens == expected and run.drafted == drafted > 0


def test_the_planned_number_of_drafts_is_kept_from_a_longer_graph(drafters: Drafters) -> None:
    """Graphs make 1, 2 or 3; a plan may ask for fewer, or for none."""
    config = drafters.speculative("eagle3", 3, watchdog=False)
    with graph_engine(drafters.pair("eagle3")[0], config) as engine:
        runner: Any = engine.engine._runner
        seen = []
        run = runner._drafting.run

        def fewer(plan: Any, *args: Any) -> None:
            plan.num_drafts = asked
            run(plan, *args)
            seen.append(runner.table.draft_tokens[plan.rows[0].slot].tolist())

        runner._drafting.run = fewer
        engine.engine.handle([AddRequest("0", ASKED[0], SamplingParams(0, 60, temperature=0.0))])
        for asked in (3, 2, 1, 0, 3):
            seen.clear()
            for _ in range(3):
                engine.engine.step()
            engine.synchronize()
            made = [sum(draft >= 0 for draft in drafts) for drafts in seen[1:]]
            assert made and set(made) == {asked}


class LazyMetadata(TensorMetadata):
    """Plans when a layer first attends, once, as FlashMLA does."""

    plan: Tensor | None = None

    def attend(self, *args: Any) -> Tensor:
        if self.plan is None:
            self.plan = self.lens.clone()
        return TensorMetadata(self.starts, self.plan, self.table, self.slots).attend(*args)


class LazyBuilder(TensorBuilder):
    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> LazyMetadata:
        found = super().build(common, desc)
        return LazyMetadata(found.starts, found.lens, found.table, found.slots)


class LazyBackend(TensorBackend):
    def create_builder(self, layers: Sequence[AttentionLayer], sizes: BuilderSizes) -> LazyBuilder:
        return LazyBuilder(*tensor_sizes(sizes))


def test_trap_01_a_plan_made_at_first_use_is_in_every_graph_of_a_whole_step(
    drafters: Drafters,
) -> None:
    """A state that was used before its capture is already planned: replays would read an old
    plan."""
    target, config = drafters.pair("eagle3")[0], drafters.speculative("eagle3", 3, watchdog=False)
    found = []
    for graphs in (False, True):
        with (
            recorded_proposals() as seen,
            graph_engine(target, config, graphs=graphs, backend=LazyBackend()) as engine,
        ):
            tokens = engine.run(ASKED, max_tokens=9).tokens
        found.append((tokens, {tuple(known): drafts for known, drafts in seen}))
    assert {"target", "draft prefill", "draft loop"} <= set(engine.replays)
    (text, plain), (tokens, drafts) = found
    assert tokens == text and len(plain) > 20
    assert all(made == plain[known] for known, made in drafts.items())
