"""Checks of stop strings and usage, against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from slipstream.server.verify.endpoint import Endpoint
from slipstream.server.verify.report import Report
from slipstream.server.verify.text import check_text

TEXT = "the quick brown fox jumps over a lazy dog"


def run(fault: str) -> Report:
    """The report on a server that says `TEXT`, with a fault where drafts are on."""

    def answer(request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content)
        text, reason, made = TEXT, "length", body["max_tokens"]
        has_drafts = body.get("speculative", {}).get("enabled", True)
        for stop in body.get("stop", ()):
            text, reason, made = text[: text.index(stop)], "stop", made - 1
            if fault == "text after the stop string" and has_drafts:
                text += stop
        if fault == "a draft too many" and has_drafts:
            made += 1
        if fault == "refused":
            return httpx.Response(400, text="no")
        usage = {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made}
        usage["prompt_tokens_details"] = {"cached_tokens": int(has_drafts)}  # may differ
        choice = {"text": text, "finish_reason": reason}
        if fault == "no usage":
            return httpx.Response(200, json={"choices": [choice]})
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    async def checks() -> Report:
        report = Report({})
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            sides = (
                Endpoint(client, "m"),
                Endpoint(client, "m", {"speculative": {"enabled": False}}),
            )
            await check_text(*sides, ["a", "b"], 12, report)
        return report

    return asyncio.run(checks())


def test_a_sound_server_passes() -> None:
    report = run("")
    assert report.passes and [c.figures.get("stops") for c in report.checks] == [6, None]


def test_a_server_without_usage_is_not_blamed() -> None:
    report = run("no usage")
    assert report.passes and report.checks[1].status == "skip"


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("text after the stop string", "stop strings", "0 of 6 replies end exactly"),
        ("a draft too many", "usage", "ended by its length of 12 counts 13 tokens"),
        ("refused", "requests", "HTTP 400: no"),
    ],
)
def test_each_fault_is_found(fault: str, check: str, words: str) -> None:
    failed = [c for c in run(fault).checks if c.status == "fail"]
    assert any(c.name == check and words in c.summary for c in failed), failed
