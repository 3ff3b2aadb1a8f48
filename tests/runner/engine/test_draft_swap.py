"""Swaps a drafter's weights under load: no request is lost, and no text or tensor address
changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import (
    AddRequest,
    ChangeSpeculator,
    SamplingParams,
    SpeculatorChanged,
    StepOutputs,
)
from slipstream.speculators.draft_length.watchdog import WINDOW, Watchdog

from ...speculators.tiny_engine import TinyEngine
from ..exchanging import REQUESTS, ask, content, engine, model, told


def test_swap_under_load_loses_nothing_and_changes_no_text(heads: Path) -> None:
    quiet = engine(heads)
    expected = quiet.run(REQUESTS, max_tokens=40).tokens
    quiet.close()
    made = engine(heads)
    requests = [
        AddRequest(str(i), ids, SamplingParams(seed=i, max_tokens=40, temperature=0.0))
        for i, ids in enumerate(REQUESTS)
    ]
    made.engine.handle(requests)
    tokens: dict[str, list[int]] = {}
    answers: list[str | None] = []
    tries = [("load", "head2"), ("try", "")]
    plan = iter([*tries, ("revert", ""), *tries, ("keep", "")])

    def take(outputs: StepOutputs) -> bool:
        for output in outputs.outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if outputs.speculator is not None:
            answers.append(outputs.speculator.error)
        return outputs.speculator is not None

    waiting = False
    while made.engine.has_work():
        if not waiting and (step := next(plan, None)) is not None:
            action, name = step
            made.engine.handle([ChangeSpeculator(action, str(heads / name))])
            waiting = True
        for outputs in made.engine.step():
            waiting &= not take(outputs)
    made.close()
    assert answers == [None] * 6
    assert tokens == expected


def test_a_swapped_head_drafts_as_one_loaded_at_the_start(heads: Path, running: TinyEngine) -> None:
    before = content(running)
    addresses = {n: b.data_ptr() for n, b in model(running).named_buffers()}
    assert ask(running, "try", heads / "head2") is None
    fresh = engine(heads, 2)
    for name, tensor in content(fresh).items():
        assert torch.equal(tensor, content(running)[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in content(running).items())
    swapped, loaded = (made.run(REQUESTS, max_tokens=20) for made in (running, fresh))
    fresh.close()
    assert swapped.accepted_per_pos == loaded.accepted_per_pos
    assert swapped.drafted == loaded.drafted
    assert ask(running, "revert") is None
    for name, tensor in content(running).items():
        assert torch.equal(tensor, before[name]), name
    assert {n: b.data_ptr() for n, b in model(running).named_buffers()} == addresses


def test_one_at_a_time(heads: Path, running: TinyEngine) -> None:
    assert ask(running, "try") == "no drafter is loaded that could be tried"
    assert ask(running, "try", heads / "head2") is None
    assert ask(running, "try", heads / "head2") == "another drafter is being tried"
    assert ask(running, "try") == "no drafter is loaded that could be tried"
    assert ask(running, "keep") is None
    assert ask(running, "try", heads / "head1") is None


def test_loading_a_head_changes_nothing_yet(heads: Path, running: TinyEngine) -> None:
    before = content(running)
    for action in ("revert", "keep"):
        assert ask(running, "load", heads / "head2") is None
        assert ask(running, action) is None
        for name, tensor in content(running).items():
            assert torch.equal(tensor, before[name]), name


def test_a_stopped_drafter_starts_again_with_new_weights(running: TinyEngine, heads: Path) -> None:
    controller = running.engine.drafts.controller  # type: ignore[union-attr]
    controller.watchdog = watchdog = Watchdog("eagle3")
    watchdog.observe(WINDOW, 0)
    assert watchdog.state() == "off" and watchdog.num_troubles["zero"] == 1
    assert ask(running, "try", heads / "head2") is None
    assert watchdog.state() == "healthy" and watchdog.num_troubles["zero"] == 1
    watchdog.observe(WINDOW, 0)
    assert ask(running, "revert") is None
    assert watchdog.is_healthy


def test_a_new_head_inherits_no_distribution_of_the_old_one(heads: Path) -> None:
    """The draft vocabularies differ: tokens that the new head cannot draw get probability 0
    again."""
    speculative = SpeculativeConfig(
        "eagle3", str(heads / "head1"), 3, draft_sampling="probabilistic", watchdog=False
    )
    made = TinyEngine(heads / "target", speculative)
    table = made.engine._runner.table  # type: ignore[attr-defined]
    own = []
    for name in ("head1", "head2"):
        if name == "head2":
            assert ask(made, "try", heads / name) is None
            assert (table.draft_tokens == -1).all() and table.draft_logits.isneginf().all()
        own.append(model(made).draft_to_target.clone())
        assert made.run(REQUESTS, max_tokens=9, temperature=0.8).drafted > 0
        finite = table.draft_logits.isfinite()
        assert finite[..., own[-1]].any()
        finite[..., own[-1]] = False
        assert not finite.any()
    made.close()
    assert set(own[0].tolist()) != set(own[1].tolist())


def test_other_kinds_of_drafters_cannot_be_swapped(heads: Path) -> None:
    made = TinyEngine(heads / "target", SpeculativeConfig("ngram", num_speculative_tokens=3))
    error = ask(made, "try", heads / "head2")
    made.close()
    assert error is not None and "eagle, eagle3" in error


def test_weights_are_swapped_only_between_whole_steps(
    running: TinyEngine, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-launched step's drafts must be judged by the distribution they were drawn from."""
    assert ask(running, "load", heads / "head2") is None
    before, engine = content(running), running.engine
    with monkeypatch.context() as patch:  # a step that waits for a mask, and was interrupted
        patch.setattr(engine, "_forwarded", object())
        patch.setattr(engine, "_bring_in", lambda *_: False)
        engine.handle([ChangeSpeculator("try")])
        assert engine.step() == [] and engine.has_work()
        for name, tensor in content(running).items():
            assert torch.equal(tensor, before[name]), name
    assert [outputs.speculator for outputs in engine.step()] == [SpeculatorChanged(None)]


def test_an_answer_reports_the_running_requests_and_the_reset_drafter(
    running: TinyEngine, heads: Path
) -> None:
    controller = running.engine.drafts.controller  # type: ignore[union-attr]
    controller.watchdog = Watchdog("eagle3")
    sampling = SamplingParams(seed=0, max_tokens=90, temperature=0.0)
    running.engine.handle([AddRequest(str(i), REQUESTS[i], sampling) for i in range(3)])
    for action in ("load", "try", "revert"):
        controller.watchdog.observe(WINDOW, 0)
        assert not controller.watchdog.is_healthy
        stats = told(running, action, heads / "head2").stats
        assert stats.num_running == 3 and stats.kv_cache_usage > 0
        assert stats.drafter_healthy is True


def test_the_running_head_is_measured_even_if_it_was_stopped(
    running: TinyEngine, heads: Path
) -> None:
    controller = running.engine.drafts.controller  # type: ignore[union-attr]
    controller.watchdog = Watchdog("eagle3")
    controller.watchdog.observe(WINDOW, 0)
    assert running.run(REQUESTS, max_tokens=20).drafted == 0
    assert ask(running, "load", heads / "head2") is None
    assert running.run(REQUESTS, max_tokens=20).drafted > 0
