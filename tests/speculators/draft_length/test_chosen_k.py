"""Whole engines with a K that changes from step to step: texts and drafts stay the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.messages import AddRequest, ResetPrefixCache, SamplingParams, StepStats
from slipstream.speculators import deferred
from slipstream.speculators.base import DraftInputs
from slipstream.speculators.draft_length.controller import DraftLength
from slipstream.speculators.draft_length.step_costs import StepCosts

from ...cases import some
from ..all_drafters import METHODS, Drafters
from ..recorded_graphs import graph_engine
from ..recorded_proposals import Proposals, recorded_proposals
from ..tiny_engine import VOCAB, TinyEngine, prompts, save_llama

K = 3
CHANGES = (3, 0, 0, 0, 1, 0, 2, *[0] * 7, 3, 3)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a target that is also its own drafter; of two layers, since both run it."""
    return str(save_llama(tmp_path_factory.mktemp("small"), layers=2))


@contextmanager
def tiny_engine(target: Path, config: SpeculativeConfig) -> Iterator[TinyEngine]:
    engine = TinyEngine(target, config)
    yield engine
    engine.close()


def planner(engine: TinyEngine) -> Any:
    """The planner of an engine, which chooses K."""
    return engine.engine.drafts


def script(engine: TinyEngine, counts: Sequence[int]) -> None:
    """Make the engine use these values of K, one per step, over and over."""
    steps = itertools.cycle(counts)

    def choose(slots: Sequence[int], num_prompt_rows: float = 0.0) -> DraftLength:
        return DraftLength(next(steps) if slots else 0, "script")

    planner(engine).controller.choose = choose


def by_text(seen: Proposals) -> dict[tuple[int, ...], list[int]]:
    return {tuple(known): drafts for known, drafts in seen if drafts}


@pytest.mark.parametrize(
    ("method", "graphs"),
    some(
        [*((method, False) for method in METHODS), ("eagle3", True)],
        kept=[("gemma4_mtp", False), ("eagle3", True)],
    ),
)
def test_drafts_after_a_pause_are_those_of_a_drafter_that_never_paused(
    drafters: Drafters, method: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "_MOST_TOKENS", 4)  # a pause of seven fills the ring, too
    monkeypatch.setattr(deferred, "_FEWEST_TOKENS", 4)
    target, config = drafters.pair(method)[0], drafters.speculative(method, K)
    found, texts, asked = [], [], prompts(3)
    with (graph_engine if graphs else tiny_engine)(target, config) as engine:
        for counts in ((K,), CHANGES):
            engine.engine.handle([ResetPrefixCache()])
            with recorded_proposals() as seen:
                script(engine, counts)
                texts.append(engine.run(asked, max_tokens=24).tokens)
            found.append(by_text(seen))
    always, paused = found
    common = always.keys() & paused.keys()
    lengths = {len(paused[known]) for known in common}
    assert len(common) > 15 and lengths == {1, 2, K}
    wrong = [known for known in common if paused[known] != always[known][: len(paused[known])]]
    assert not wrong
    off = TinyEngine(target, SpeculativeConfig())
    assert texts == [off.run(asked, max_tokens=24).tokens] * 2
    off.close()


def test_a_copy_of_the_target_is_right_after_every_pause(small: str) -> None:
    config = SpeculativeConfig(
        method="draft_model", model=small, num_speculative_tokens=K, draft_sampling="greedy"
    )
    engine = TinyEngine(Path(small), config)
    script(engine, CHANGES)
    run = engine.run(prompts(4), max_tokens=60)
    engine.close()
    assert run.num_drafts > 20 and run.accepted >= run.drafted - 4 * K  # the last ones are cut


@pytest.mark.parametrize("method", some(["eagle3", "draft_model", "mtp"], ["draft_model", "mtp"]))
def test_blocks_are_shared_only_once_the_drafter_has_seen_them(
    drafters: Drafters, method: str
) -> None:
    target, config = drafters.pair(method)[0], drafters.speculative(method, K)
    prompt = prompts(1, seed=3, longest=20)[0]
    engine = TinyEngine(target, config)
    script(engine, [0])  # all that it says is deferred when the request ends
    said = engine.run([prompt], max_tokens=12).tokens["0"]
    script(engine, [K])
    with recorded_proposals() as seen:
        again = engine.run([[*prompt, *said]], max_tokens=8)
    engine.close()
    fresh = TinyEngine(target, config)
    with recorded_proposals() as expected:
        alone = fresh.run([[*prompt, *said]], max_tokens=8)
    fresh.close()
    assert again.tokens == alone.tokens and seen == expected
    assert again.cached_tokens["0"] <= len(prompt)


def test_drafts_come_back_when_they_become_right_again(
    small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is a copy of the target; for a time its drafts are made wrong."""
    config = SpeculativeConfig(
        method="draft_model", model=small, draft_sampling="greedy", watchdog=False,
        max_speculative_tokens=K,
    )  # fmt: skip
    is_spoilt = spoil(monkeypatch)
    engine = TinyEngine(Path(small), config)
    costs = StepCosts({(1, k): 1 + 0.02 * k for k in range(K + 1)}, K)
    monkeypatch.setattr(costs, "refine", lambda *args: None)  # tiny steps tell nothing
    planner(engine).controller.costs = costs
    plain, modes = None, []
    for spoilt in (False, True, False):
        is_spoilt.append(spoilt)
        stats: list[StepStats] = []
        texts = []
        for _ in range(2):
            texts.append(run_with_stats(engine, [1, 2, 3], 110 if spoilt else 90, stats))
        plain = plain or texts[0]
        assert all(text[:90] == plain for text in texts)
        chosen = [each.current_k for each in stats if each.current_k is not None]
        modes.append(chosen)
    engine.close()
    good, poor, again = modes
    assert good[-15:].count(K) >= 14
    assert poor[-60:].count(0) >= 40  # the others are probes
    assert again[-15:].count(K) >= 14


def test_costs_measured_beside_other_work_are_asked_of_real_steps(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start-up a busy machine measured drafts as fifty times too expensive."""
    target, _ = drafters.pair("eagle")
    config = drafters.speculative("eagle", num_speculative_tokens=None, max_speculative_tokens=K)
    engine = TinyEngine(target, config)
    controller = planner(engine).controller
    assert not any(controller.costs.is_certain(1, k) for k in range(K + 1))
    costs = StepCosts({(1, k): 0.5 if k else 0.01 for k in range(K + 1)}, K, is_trusted=False)
    refine = costs.refine

    def as_long_as_others(num_reqs: int, num_drafts: float, _: float, steady: int | None) -> None:
        refine(num_reqs, num_drafts, 0.01, steady)  # what this machine takes would be luck

    monkeypatch.setattr(costs, "refine", as_long_as_others)
    controller.costs = costs
    stats: list[StepStats] = []
    for _ in range(3):
        run_with_stats(engine, [1, 2, 3], 110, stats)
    engine.close()
    assert 1 in {each.current_k for each in stats if each.k_reason == "probe"}
    assert costs.is_certain(1, 0) and costs.is_certain(1, 1)
    assert [costs.seconds(1, k) for k in (0, 1)] == pytest.approx([0.01, 0.01], rel=0.01)


def spoil(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make every proposal wrong while the last item of the returned list is true."""
    propose: Callable[..., None] = DraftGraphs.propose
    flags = [False]

    def spoilt(self: Any, inputs: DraftInputs) -> None:
        propose(self, inputs)
        if flags[-1]:
            drafts = inputs.requests.draft_tokens
            drafts.copy_(torch.where(drafts < 0, drafts, (drafts + 1) % VOCAB))

    monkeypatch.setattr(DraftGraphs, "propose", spoilt)
    return flags


def run_with_stats(
    engine: TinyEngine, prompt: list[int], max_tokens: int, stats: list[StepStats], **options: Any
) -> list[int]:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, **options)
    engine.engine.handle([AddRequest("a", prompt, sampling)])
    tokens: list[int] = []
    while engine.engine.has_work():
        for step in engine.engine.step():
            stats.append(step.stats)
            tokens += [token for output in step.outputs for token in output.token_ids]
    engine.synchronize()
    return tokens


@pytest.fixture
def copy_engine(small: str) -> Iterator[TinyEngine]:
    """An engine with a fixed K, and a copy of the target as its drafter."""
    engine = TinyEngine(
        Path(small),
        SpeculativeConfig(
            method="draft_model", model=small, draft_sampling="greedy", num_speculative_tokens=K
        ),
    )
    yield engine
    engine.close()


def test_a_broken_drafter_is_turned_off_told_and_tried_again(
    copy_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = spoil(monkeypatch)
    watchdog = planner(copy_engine).controller.watchdog
    now = 100.0
    monkeypatch.setattr(watchdog, "_clock", lambda: now)
    text = run_with_stats(copy_engine, [5, 6], 100, [])
    flags.append(True)
    stats: list[StepStats] = []
    assert run_with_stats(copy_engine, [5, 6], 100, stats) == text
    assert [each.drafter_troubles for each in stats if each.drafter_troubles] == [{"zero": 1}]
    assert (stats[-2].drafter_healthy, stats[-2].k_reason) == (False, "unhealthy")
    assert sum(each.num_draft_tokens for each in stats) < 220
    now = 120.0
    flags.append(False)
    stats = []
    for _ in range(2):
        assert run_with_stats(copy_engine, [5, 6], 100, stats) == text
    assert stats[-2].drafter_healthy and stats[-2].k_reason == "fixed"
    assert sum(each.num_accepted_tokens for each in stats) > 100


@pytest.mark.parametrize(
    ("options", "most"),
    [({"speculative_enabled": False}, 0), ({"speculative_max_tokens": 1}, 1), ({}, K)],
)
def test_a_request_gets_no_more_drafts_than_it_wants(
    small: str, options: dict[str, Any], most: int
) -> None:
    config = SpeculativeConfig(
        method="draft_model", model=small, draft_sampling="greedy", max_speculative_tokens=K
    )
    engine = TinyEngine(Path(small), config)
    planner(engine).controller.costs = StepCosts({(1, k): 1.0 for k in range(K + 1)}, K)
    stats: list[StepStats] = []
    run_with_stats(engine, [1, 2], 30, stats, **options)
    engine.close()
    assert max(each.num_draft_tokens for each in stats) == most
    assert max(each.current_k or 0 for each in stats) == most


def test_steps_are_measured_at_the_start_where_k_is_chosen(drafters: Drafters) -> None:
    target = drafters.pair("eagle")[0]
    config = drafters.speculative("eagle", num_speculative_tokens=None, max_speculative_tokens=K)
    engine = TinyEngine(target, config)
    facts = engine.engine._runner.facts  # type: ignore[attr-defined]
    assert {k for n, k in facts.step_seconds if n == 1} >= {0, K}
    assert all(0 < seconds < 1 for seconds in facts.step_seconds.values())
    assert 0 < facts.startup_seconds["measure_steps"] < 3
    first = engine.run(prompts(3), max_tokens=20).tokens
    engine.close()
    off = TinyEngine(target, SpeculativeConfig())
    assert first == off.run(prompts(3), max_tokens=20).tokens
    off.close()
