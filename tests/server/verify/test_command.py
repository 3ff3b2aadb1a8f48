"""The command line of `slipstream verify`: what it refuses, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.server.commands import main
from slipstream.server.verify import session
from slipstream.server.verify.plan import Plan
from slipstream.server.verify.report import Report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-sc", "off"], "verify needs a drafter; name one with --speculative-config"),
        (["--samples", "-1"], "--samples must be at least 0, not -1"),
        (["--sample-tokens", "3"], "--sample-tokens must be at least 4, not 3"),
        (["--url", "localhost:1"], "--url 'localhost:1': must begin with http:// or https://"),
        (["--url", "http://127.0.0.1:9"], "--url: All connection attempts failed"),
        (["--url", "http://a", "--url", "http://b", "--url", "c"], "twice, not 3 times"),
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--html", "/no/such/report.html"], "--html /no/such/report.html: its folder does not"),
        (["--output", "/no/such/report.json"], "--output /no/such/report.json"),
        (["--data", "/no/such.jsonl"], "/no/such.jsonl: no such file or directory"),
        (
            ["-sc", '{"method":"ngram","synthetic_acceptance_rates":[0.5]}'],
            "synthetic_acceptance_rates are not lossless",
        ),
    ],
)
def test_wrong_command_lines_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.startswith("slipstream verify: error: ")
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("passes", [True, False])
def test_the_report_is_printed_and_written_and_sets_the_exit_status(
    passes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = []

    async def checked(config: Any, plan: Plan, data: str) -> Report:
        plans.append(plan)
        report = Report({"model": "m"})
        report.add("Greedy text", "all requests at once", passes, "a sentence")
        return report

    monkeypatch.setattr(session, "verify", checked)
    files = [tmp_path / name for name in ("report.json", "report.html")]
    sizes = ["--num-prompts", "2", "--max-tokens", "3", "--samples", "5", "--sample-tokens", "7"]
    written = ["--minutes", "0.5", "--output", str(files[0]), "--html", str(files[1])]
    assert main(["verify", *sizes, *written]) == (0 if passes else 1)
    assert plans == [Plan(2, 3, 5, 7, minutes=0.5)]
    shown = capsys.readouterr().out
    assert "all requests at once" in shown and ("No check failed." in shown) == passes
    found = json.loads(files[0].read_text())
    assert found["passes"] is passes and found["checks"][0]["summary"] == "a sentence"
    assert "Is speculation lossless? m" in files[1].read_text()


def test_without_an_engine_there_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failed(config: Any, plan: Plan, data: str) -> None:
        return None

    monkeypatch.setattr(session, "verify", failed)
    assert main(["verify"]) == 1
