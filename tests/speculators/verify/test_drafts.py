"""`verify` finds faults of drafters, which change no text, and passes sound drafters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import SamplingParams
from slipstream.server.verify.drafts import (
    check_alignment,
    check_chain,
    check_fresh,
    judge_proposals,
    report_acceptance,
    report_speed,
)
from slipstream.server.verify.plan import Subject
from slipstream.server.verify.replies import Reply, generate
from slipstream.server.verify.report import Report
from slipstream.speculators.autoregressive import AutoRegressiveSpeculator
from slipstream.speculators.base import DraftModelSpeculator

from ..recorded_graphs import graph_engine
from .in_process import InProcess, V, save_pair, start

PROMPTS = [[n, n + 5, (7 * n) % V, 3] for n in range(1, 7)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def head(pair: tuple[Path, Path]) -> Iterator[InProcess]:
    """A target with a random head."""
    found = start(pair[0], "eagle3", pair[1])
    yield found
    found.tiny.close()


@pytest.fixture(scope="module")
def itself(pair: tuple[Path, Path]) -> Iterator[InProcess]:
    """A target that drafts for itself, so that every draft is accepted."""
    found = start(pair[0], "draft_model", pair[0], num_speculative_tokens=3)
    yield found
    found.tiny.close()


def run(engine: InProcess, method: str, max_tokens: int = 16) -> Report:
    report = Report({})
    subject = Subject(PROMPTS, [], V, "float32", method, one_hot=True)

    async def checks() -> None:
        sampling = SamplingParams(0, max_tokens, temperature=0.0)
        on, off = [
            await generate(engine, PROMPTS, sampling, drafts=drafts, concurrency=1, salt="greedy")
            for drafts in (True, False)
        ]
        check_alignment(on, report)
        await check_fresh(engine, on, subject, report)
        await check_chain(engine, on, method == "draft_model", report)
        report_acceptance("greedy", on, report)
        report_speed(on, off, report)

    asyncio.run(checks())
    return report


def found(report: Report, name: str) -> str:
    return next(check.status for check in report.checks if check.name == name)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_sound_drafters_pass(method: str, head: InProcess, itself: InProcess) -> None:
    report = run(head if method == "eagle3" else itself, method)
    assert report.passes, report.table()
    assert found(report, "made step by step, or afresh") == "pass"
    if method == "draft_model":
        assert found(report, "second drafts") == found(report, "positions") == "pass"
        accepted = next(c for c in report.checks if c.name == "acceptance, greedy")
        assert min(accepted.figures["acceptance"]) > 0.95
        assert any(check.name == "speed-up, one at a time" for check in report.checks)


def test_whole_steps_in_graphs_report_the_drafts_of_an_eager_engine(
    pair: tuple[Path, Path], head: InProcess
) -> None:
    config = SpeculativeConfig(
        "eagle3", str(pair[1]), num_speculative_tokens=2, draft_sampling="greedy", watchdog=False
    )
    sampling = SamplingParams(0, 12, temperature=0.0)
    with graph_engine(pair[0], config, graph={"cudagraph_whole_step": True}) as engine:
        ours = asyncio.run(generate(InProcess(engine), PROMPTS, sampling, drafts=True))
    assert engine.replays["token selection"]
    theirs = asyncio.run(generate(head, PROMPTS, sampling, drafts=True))
    sides: list[dict[tuple[int, ...], list[int]]] = [{}, {}]
    for side, replies in zip(sides, (ours, theirs), strict=True):
        for reply in replies:
            side.update(reply.texts_and_drafts)
    report = Report({})
    judge_proposals("graphs against eager", *sides, "float32", report, "")
    assert report.passes and report.checks[0].figures["proposals"] > 20, report.table()
    wrong = {text: [(draft + 1) % V for draft in drafts] for text, drafts in sides[0].items()}
    judge_proposals("graphs against eager", wrong, sides[1], "float32", report, "a reason")
    assert not report.passes and report.checks[1].summary.endswith("explains: a reason")


def test_a_stale_kv_row_is_found(head: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """In decode steps, the first row that the drafter takes in is that of another token."""
    first_pass = AutoRegressiveSpeculator.first_pass

    def stale(self: AutoRegressiveSpeculator, num_tokens: int, *args: Any) -> None:
        if num_tokens <= 3:
            self.input_ids[0] = 0
        first_pass(self, num_tokens, *args)

    monkeypatch.setattr(AutoRegressiveSpeculator, "first_pass", stale)
    report = run(head, "eagle3")
    assert found(report, "made step by step, or afresh") == "fail", report.table()


def test_drafts_fed_back_one_position_late_are_found(
    itself: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second decode on, the drafter reads the draft before its newest."""
    decode = AutoRegressiveSpeculator.decode
    earlier: list[Tensor] = []

    def late(self: AutoRegressiveSpeculator, num_reqs: int, attention: Any) -> None:
        newest = self.decode_ids[:num_reqs].clone()
        if int(self.step[0]) and earlier:
            self.decode_ids[:num_reqs] = earlier.pop()[:num_reqs]
        earlier[:] = [newest]
        decode(self, num_reqs, attention)

    monkeypatch.setattr(AutoRegressiveSpeculator, "decode", late)
    report = run(itself, "draft_model")
    assert found(report, "second drafts") == "fail", report.table()


def test_drafts_stored_one_position_late_are_found(
    itself: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DraftModelSpeculator.store_drafts

    def late(self: DraftModelSpeculator, *args: Any) -> None:
        self.draft_tokens[:, 1:] = self.draft_tokens[:, :-1].clone()
        store(self, *args)

    monkeypatch.setattr(DraftModelSpeculator, "store_drafts", late)
    report = run(itself, "draft_model", max_tokens=30)
    assert found(report, "positions") == "fail", report.table()
    assert "before its place" in report.table()


def test_without_drafts_there_is_nothing_to_compare() -> None:
    report = Report({})
    check_alignment([Reply([1], [2, 3])], report)
    report_speed([Reply([1])], [Reply([1])], report)
    assert [check.status for check in report.checks] == ["skip"]
