"""The command line of `slipstream verify`: what it refuses, and how."""

from __future__ import annotations

import pytest

from slipstream.server.commands import main


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
