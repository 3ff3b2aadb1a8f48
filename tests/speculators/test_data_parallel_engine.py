"""Two ranks, each a whole runner with a drafter in graphs: an idle one runs the other's passes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from slipstream.configs.schema import Config, ParallelConfig, SpeculativeConfig
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.engine.lockstep import Lockstep
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.runner.scheduling.draft_planner import plan_drafts
from slipstream.runner.scheduling.plan import StepPlan
from slipstream.runner.step.data_parallel import DataParallelSync
from slipstream.runner.step.target import Target
from slipstream.speculators.draft_length.controller import DraftLength

from ..cases import some
from .all_drafters import Drafters
from .recorded_graphs import GraphEngine, graph_engine
from .tiny_engine import TinyEngine, prompts

K = 3
EACH_CHOOSES = ("eagle3", ((K, 0, 0, 1), (0, 0, K, 0, 2)))  # by rank


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


class Meeting:
    """Replaces the process group: adds up the tables of all ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tables: dict[int, Tensor] = {}

    def add(self, rank: int, table: Tensor) -> Tensor:
        self.tables[rank] = table.clone()
        self.barrier.wait()
        total: Any = sum(self.tables.values())
        self.barrier.wait()
        return total


class Host:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.meeting.add(self.rank, x)

    def least(self, values: Sequence[int]) -> list[int]:
        raise AssertionError


class MetSync(DataParallelSync):
    """Its ranks never rest."""

    def __init__(self, meeting: Meeting, rank: int, dispatch: Any) -> None:
        super().__init__(dispatch, K + 1, rank, 2, Host(meeting, rank))

    def takes_part(self, wave: int | None) -> bool:
        return True


class Rank:
    """One engine, driven step by step; `passes` is what it ran, in order."""

    def __init__(
        self, engine: GraphEngine, meeting: Meeting, rank: int, counts: Sequence[int] = ()
    ) -> None:
        """`counts`: the number of drafts after each step, repeated; empty: always the most."""
        self.scheduler: Any = engine.engine._scheduler
        self.runner: Any = engine.engine._runner
        self.engine = engine.engine
        self.runner.sync = MetSync(meeting, rank, self.runner._target.dispatch)
        self.passes: list[tuple[object, ...]] = []
        self.tokens: dict[str, list[int]] = {}
        self.idle_steps = 0
        config = Config(parallel=ParallelConfig(data_parallel_size=2))
        config = replace(config, speculative=engine.speculator.config)
        self.drafts: Any = plan_drafts(self.runner.facts, config) if counts else None
        if counts:
            steps = itertools.cycle(counts)
            self.drafts.controller.choose = lambda slots, num_prompt_rows: DraftLength(
                next(steps) if slots else 0, "script"
            )

    def launch(self) -> Any:
        self.plan = self.scheduler.schedule() or StepPlan(10_000 + self.idle_steps)
        self.idle_steps += not self.plan.rows
        if self.drafts is not None and self.plan.rows:
            self.wanted = self.drafts.complete(self.plan)
            self.scheduler.set_num_speculative_tokens(self.wanted)
        return self.runner.execute(self.plan)

    def agree(self) -> None:
        """After the step: verify what all ranks have agreed to keep, as the engine does."""
        if self.drafts is not None and self.plan.num_drafts:
            calls: Any = SimpleNamespace(socket=None)  # nobody calls
            lockstep = Lockstep(self.runner.sync, calls)
            self.scheduler.set_num_speculative_tokens(lockstep.num_drafts(self.wanted))

    def land(self, handle: Any) -> None:
        results = handle.get()
        if not self.plan.rows:
            return
        for output in self.scheduler.apply(self.plan, results).outputs:
            assert output.error is None, output.error
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)


def add(rank: Rank, names: dict[str, int]) -> None:
    asked = [
        AddRequest(name, prompts(9)[int(name)], SamplingParams(1, length, temperature=0.0))
        for name, length in names.items()
    ]
    rank.engine.handle(list(asked))


@pytest.mark.parametrize(
    ("method", "counts"),
    some(
        [*((method, ()) for method in ("eagle3", "draft_model", "gemma4_mtp")), EACH_CHOOSES],
        kept=[("draft_model", ()), EACH_CHOOSES],
    ),
)
def test_trap_16_both_ranks_run_the_same_passes(
    drafters: Drafters,
    method: str,
    counts: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = drafters.pair(method)[0]
    alone = TinyEngine(target, SpeculativeConfig())
    wanted = alone.run(prompts(9), max_tokens=14).tokens
    alone.close()
    ranks: dict[int, Rank] = {}  # by the id of target or drafter

    def noted(owner: Any, name: str, what: Any) -> None:
        plain = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            result = plain(self, *args)
            if id(self) in ranks and (event := what(result, *args)) is not None:
                ranks[id(self)].passes.append(event)
            return result

        monkeypatch.setattr(owner, name, call)

    noted(Target, "_run", lambda _, desc, *rest: ("target", desc.mode.name, desc))
    noted(
        DraftGraphs, "_first_pass",
        lambda _, desc, *rest: ("prefill", desc.mode.name, desc),
    )  # fmt: skip
    noted(
        DraftGraphs, "_replay_loop",
        lambda replayed, padded, n: ("loop", "FULL", (padded, n)) if replayed else None,
    )  # fmt: skip
    noted(DraftGraphs, "_decode", lambda *_: ("decode", "NONE", None))
    meeting = Meeting(2)
    with contextlib.ExitStack() as stack:
        both = []
        for rank in range(2):
            engine = stack.enter_context(graph_engine(target, drafters.speculative(method, K)))
            both.append(Rank(engine, meeting, rank, counts[rank] if counts else ()))
            ranks[id(both[-1].runner._target)] = ranks[id(engine.draft_graphs)] = both[-1]
        add(both[0], {"0": 6, "1": 14})
        add(both[1], {"2": 3})
        late = {9: (1, {"3": 8, "4": 5}), 13: (0, {"5": 4})}
        for step in range(28):
            if step in late:
                add(both[late[step][0]], late[step][1])
            handles = [rank.launch() for rank in both]
            for rank, handle in zip(both, handles, strict=True):
                rank.land(handle)
        for rank in both:
            rank.runner.synchronize()
            rank.runner.sync._host = None  # another call fails
    for rank in both:
        assert rank.idle_steps > 3
        for name, tokens in rank.tokens.items():
            assert tokens == wanted[name][: len(tokens)]
    assert {name: len(t) for rank in both for name, t in rank.tokens.items()} == {
        "0": 6, "1": 14, "2": 3, "3": 8, "4": 5, "5": 4
    }  # fmt: skip
    first, second = (rank.passes for rank in both)
    assert [event[:2] for event in first] == [event[:2] for event in second]
    # in graphs, the very same ones
    assert [e for e in first if e[1] == "FULL"] == [e for e in second if e[1] == "FULL"]
    kinds = {event[:2] for event in first}
    assert {("target", "FULL"), ("target", "NONE"), ("loop", "FULL")} <= kinds
    assert both[0].runner.sync.num_exchanges == both[1].runner.sync.num_exchanges == 28


def test_ranks_that_want_different_numbers_of_drafts_run_whole_steps(drafters: Drafters) -> None:
    """Steps of 4 rows a request here and 3 there would fit no graph."""
    target = drafters.pair("eagle3")[0]
    alone = TinyEngine(target, SpeculativeConfig())
    wanted = alone.run(prompts(9), max_tokens=14).tokens
    alone.close()
    meeting = Meeting(2)
    with contextlib.ExitStack() as stack:
        both = []
        for rank in range(2):
            engine = stack.enter_context(graph_engine(target, drafters.speculative("eagle3", K)))
            both.append(Rank(engine, meeting, rank, (K - rank,)))
            add(both[-1], {str(2 * rank): 14, str(2 * rank + 1): 14})
        modes = []
        for _ in range(12):
            for rank, handle in [(rank, rank.launch()) for rank in both]:
                rank.land(handle)
            for rank in both:
                rank.runner.synchronize()
                rank.agree()
            lengths = [{row.num_tokens for row in rank.plan.rows} for rank in both]
            modes.append(lengths)
        for rank in both:
            rank.runner.sync._host = None
    for rank in both:
        assert len(rank.tokens) == 2
        for name, tokens in rank.tokens.items():
            assert tokens == wanted[name][: len(tokens)]
    # After the prompts, and while no request ends, all rows verify K drafts on both ranks.
    assert modes.count([{K + 1}, {K + 1}]) > 2, modes
    assert [{K + 1}, {K}] not in modes[2:], modes


def test_an_engine_alone_has_no_exchange(drafters: Drafters) -> None:
    target = drafters.pair("eagle3")[0]
    with graph_engine(target, drafters.speculative("eagle3", K)) as engine:
        assert engine.engine._runner.sync is None  # type: ignore[attr-defined]
        assert engine.engine._lockstep is None and engine.engine.calls is None
