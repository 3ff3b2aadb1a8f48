"""A drafter is swapped on all ranks at the same step, or on none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.engine import rank_drafters
from slipstream.runner.parallel.commands import DropDrafter, Execute, LoadDrafter, SwapDrafter

from ...speculators.tiny_engine import TinyEngine
from ..exchanging import REQUESTS, ask, engine, model, target_and_heads
from .thread_group import ThreadGroup, build_on_threads


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_and_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def groups() -> list[ThreadGroup]:
    return []


DTYPES = ("float32", "auto")


@pytest.fixture(
    params=[(1, "float32"), pytest.param((2, "float32"), marks=pytest.mark.slow), (2, "auto")],
    ids=str,
)
def division(request: pytest.FixtureRequest) -> tuple[int, str]:
    """The ranks that divide the drafter, and the type of weights: "auto" packs them on a CPU."""
    found: tuple[int, str] = request.param
    return found


@pytest.fixture
def running(
    heads: Path, groups: list[ThreadGroup], division: tuple[int, str]
) -> Iterator[TinyEngine]:
    ranks, dtype = division
    speculative = SpeculativeConfig(
        *("eagle3", str(heads / "head1"), 3),
        draft_sampling="greedy",
        watchdog=False,
        draft_tensor_parallel_size=ranks,
    )
    build = partial(build_on_threads, groups)
    made = TinyEngine(heads / "target", speculative, dtype=dtype, build=build)
    fc = model(made).fc
    assert fc.in_features == 3 * 32 // ranks
    assert (fc.weight is None) == (dtype == "auto")
    yield made
    made.close()


def work_of(made: TinyEngine) -> tuple[Any, ...]:
    run = made.run(REQUESTS, max_tokens=12)
    return run.tokens, run.drafted, run.accepted_per_pos


def test_two_ranks_draft_as_one_before_during_and_after_a_trial(
    heads: Path, running: TinyEngine, groups: list[ThreadGroup], division: tuple[int, str]
) -> None:
    alone = engine(heads, dtype=division[1])
    found: list[list[tuple[Any, ...]]] = []
    for made in (alone, running):
        results = [work_of(made)]
        for action in ("try", "revert"):
            assert ask(made, action, heads / "head2" if action == "try" else None) is None
            results.append(work_of(made))
        assert ask(made, "try", heads / "head2") is None
        assert ask(made, "keep") is None
        results.append(work_of(made))
        found.append(results)
    alone.close()
    assert found[0] == found[1]
    assert found[0][0][1:] != found[0][1][1:]  # the heads draft differently
    (group,) = groups
    group.check()
    told = [type(command) for command in group.sent if not isinstance(command, Execute)]
    swaps = [kind for kind in told if kind in (LoadDrafter, SwapDrafter, DropDrafter)]
    trial = [LoadDrafter, SwapDrafter]
    assert swaps == [*trial, SwapDrafter, DropDrafter, *trial, DropDrafter]


@pytest.mark.parametrize(
    "division",
    [(1, "float32"), *(pytest.param((2, dtype), marks=pytest.mark.slow) for dtype in DTYPES)],
    indirect=True,
    ids=str,
)
def test_a_head_that_one_rank_cannot_load_is_tried_on_none(
    heads: Path, running: TinyEngine, groups: list[ThreadGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(speculator: Any, model: str) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result("there is no memory left")
        return future

    before = work_of(running)
    with monkeypatch.context() as patch:
        patch.setattr(rank_drafters, "load_drafter", refuse)
        answer = ask(running, "try", heads / "head2")
    assert answer == "rank 1: there is no memory left"
    assert ask(running, "try") == "no drafter is loaded that could be tried"
    assert work_of(running) == before
    assert ask(running, "try", heads / "head2") is None
    assert work_of(running) != before
    missing = str(heads / "nothing")
    assert ask(running, "revert") is None
    assert missing in str(ask(running, "load", Path(missing)))
    assert isinstance(groups[0].sent[-1], DropDrafter)
    groups[0].check()
