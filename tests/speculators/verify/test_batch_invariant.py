"""`slipstream verify` under `--batch-invariant`: an engine that keeps the promise passes, and one
that only rounds well fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import TokenLogprobs
from slipstream.server.verify.greedy import Greedy, judge, judge_company
from slipstream.server.verify.plan import Plan, Subject
from slipstream.server.verify.replies import Reply
from slipstream.server.verify.report import Report
from slipstream.server.verify.rounding import (
    Rounding,
    differences,
    say_none_was_compared,
)
from slipstream.server.verify.run import run_checks

from ..tiny_engine import TinyEngine
from .in_process import InProcess, V, save_pair

PROMPTS = [[1, 4, 2], *([n, n + 5, (7 * n) % V, 3] for n in range(1, 5))]


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.status == "fail"}


@pytest.mark.parametrize("keeps_promise", [True, False])
def test_an_engine_is_held_to_the_promise(keeps_promise: bool, tmp_path: Path) -> None:
    target, head = save_pair(tmp_path)
    options = {"num_speculative_tokens": 2, "watchdog": False}
    config = SpeculativeConfig("eagle3", str(head), **options)
    tiny = TinyEngine(target, config, graph={"batch_invariant": keeps_promise})
    subject = Subject(
        prompts=PROMPTS, stop_token_ids=[], vocab_size=V, dtype="float32",
        method="eagle3", one_hot=True, batch_invariant=True,
    )  # fmt: skip
    report = Report({})
    samples = 4 if keeps_promise else 0
    plan = Plan(2, 8, num_samples=samples, sample_tokens=6, options=("seed",))
    asyncio.run(run_checks(InProcess(tiny), subject, plan, report))
    tiny.close()
    if keeps_promise:
        assert report.passes, report.table()
        assert {"in any company", "seed repeats the text"} <= {c.name for c in report.checks}
    else:  # float32 rounds by about 1e-6 nats
        assert {"decode against prefill", "with drafts"} & failed(report)


def reply(*ids: int) -> Reply:
    return Reply([1, 2], token_ids=list(ids))


def test_a_near_tie_is_a_failure() -> None:
    on, off = reply(5, 6), reply(5, 7)
    rows = [TokenLogprobs(token, -1.0, 1, [token], [-1.0]) for token in on.token_ids]
    for exact in (False, True):
        report = Report({})
        judge("name", Greedy([on], [off], [rows]), Rounding(0.1, 0.01, exact), report)
        assert report.passes is not exact
    assert "promises equal text" in report.table()


def test_unlikely_tokens_count_where_the_promise_is_exact() -> None:
    """A large vocabulary and random weights leave every token of a reply unlikely."""
    told, found = ([TokenLogprobs(5, value, 1, [5], [value])] for value in (-11.7, -11.6))
    own = Reply([1], token_ids=[5], logprobs=told)
    assert differences([own], [found]) == []
    assert differences([own], [found], exact=True) == pytest.approx([0.1])
    report = Report({})
    for replies in ([own], [Reply([1], token_ids=[5])]):
        say_none_was_compared(report, "name", replies)
    assert [check.status for check in report.checks] == ["skip", "fail"]
    assert "a probability below 0.7%" in report.checks[0].summary


def test_replies_must_be_equal_in_any_company() -> None:
    for other, passes in ((reply(5, 6), True), (reply(5, 7), False)):
        report = Report({})
        judge_company([reply(5, 6)], [other], report)
        assert report.passes is passes
