"""Checks of servers elsewhere, against a server of a few lines with a known distribution."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import httpx
import pytest

from slipstream.server.verify.plan import Plan
from slipstream.server.verify.report import Report
from slipstream.server.verify.text import Endpoint, RequestFailed, check_text
from slipstream.server.verify.url import Tokens, base, check_greedy, check_samples

from ..api_fakes import MODEL, ScriptedEngine, make_app

WORDS = ["a", "b", "c", "d", "e", "f"]
LAW = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
PROMPTS = ["one", "two", "three"]


class Server:
    """Each word depends on the one before: the likeliest is the next in the alphabet."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.draw, self.open = fault, random.Random(5), 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content)
        self.open += 1
        await asyncio.sleep(0)
        texts, logprobs, tops = [], [], []
        place = len(body["prompt"])
        for _ in range(body["max_tokens"]):
            law = {WORDS[(place + n) % 6]: p for n, p in enumerate(LAW)}
            place += self._choice(body["temperature"])
            texts.append(WORDS[place % 6])
            logprobs.append(math.log(law[texts[-1]]))
            tops.append({word: math.log(p) for word, p in list(law.items())[:5]})
        self.open -= 1
        found = {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops}
        choice = {"text": "".join(texts), "finish_reason": "length", "logprobs": found}
        return httpx.Response(200, json={"choices": [choice]})

    def _choice(self, temperature: float) -> int:
        if temperature == 0:
            return 1 if self.fault == "under load" and self.open > 1 else 0
        if self.fault == "lossy" and self.draw.random() < 0.3:
            return 4
        return self.draw.choices(range(6), LAW)[0]


def run(on: Server, off: Server | None = None) -> Report:
    report = Report({})

    async def checks() -> None:
        ends = [
            Endpoint(
                httpx.AsyncClient(
                    transport=httpx.MockTransport(server.answer), base_url="http://x"
                ),
                "m",
            )
            for server in (on, off)
            if server is not None
        ]
        await check_greedy(ends[0], ends[-1], PROMPTS, 8, report)
        await check_samples(
            ends[0], ends[-1], "one", Plan(num_samples=250, sample_tokens=8), report
        )
        for end in ends:
            await end.client.aclose()

    asyncio.run(checks())
    return report


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "fail"]


def test_sound_servers_pass() -> None:
    alone, two = run(Server()), run(Server(), Server())
    assert failed(alone) == failed(two) == [], two.table()
    assert len(alone.checks) == 4 and len(two.checks) == 7


def test_a_lossy_server_is_found_by_its_own_log_probabilities_and_beside_another() -> None:
    assert "an unlikely token" in failed(run(Server("lossy")))
    assert any(name.startswith("token ") for name in failed(run(Server("lossy"), Server())))


def test_greedy_text_that_depends_on_the_load_is_found() -> None:
    report = run(Server("under load"))
    assert failed(report) == ["all requests at once"]
    assert "differ: prompt" in report.table()


def test_log_probabilities_are_read_in_both_formats() -> None:
    row = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    assert Tokens.of({"logprobs": {"content": [row]}}) == Tokens(["a"], [-0.5], [{"a": -0.5}])
    with pytest.raises(RequestFailed, match="no log probabilities"):
        Tokens.of({"logprobs": None})


def test_this_server_is_understood_by_the_checks_of_urls_and_of_text() -> None:
    """The scripted engine says the same text with and without drafts, three tokens a step."""
    report, engine = Report({}), ScriptedEngine()

    async def checks() -> None:
        transport = httpx.ASGITransport(app=make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            on = Endpoint(client, MODEL)
            off = Endpoint(client, MODEL, {"speculative": {"enabled": False}})
            reply = await on.complete("hello", max_tokens=30, temperature=0, logprobs=5)
            found = Tokens.of(reply["choices"][0])
            assert "".join(found.texts).startswith("Hello w")
            assert all(len(row) >= 3 for row in found.top)
            await check_text(on, off, ["hello", "hell"], 40, report)

    asyncio.run(checks())
    assert report.passes, report.table()
    assert {request.sampling.speculative_enabled for request in engine.requests} == {True, False}


def test_a_url_may_end_in_v1() -> None:
    assert base("http://a:1/v1/") == base("http://a:1") == "http://a:1"
