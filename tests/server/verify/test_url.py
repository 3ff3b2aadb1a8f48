"""Checks of servers elsewhere, against a server of a few lines with a known distribution."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import httpx
import pytest

from slipstream.server.verify.elsewhere.url import (
    Tokens,
    ask_again,
    base,
    check_greedy,
    check_samples,
    gap,
    judge_greedy,
)
from slipstream.server.verify.endpoint import Endpoint
from slipstream.server.verify.plan import Plan
from slipstream.server.verify.report import Report
from slipstream.server.verify.text import check_text

from ..api_fakes import MODEL, ScriptedEngine, make_app

WORDS = ["a", "b", "c", "d", "e", "f"]
LAW = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
PROMPTS = ["one", "two", "three"]


ENDS = "<|end|>"


class Server:
    """Each word depends on the one before: the likeliest is the next in the alphabet.

    "holes": drafts of the likeliest word are verified, and accepted ones have no log probabilities,
    as in llama.cpp's server. "silent": there are none at all. "ends": every fourth sampled reply
    goes no further at each place, and the token that ended it is not reported."""

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
            if self.fault == "ends":
                law = {ENDS: 0.25} | {word: 0.75 * p for word, p in law.items()}
                if body["temperature"] and self.draw.random() < 0.25:
                    break
            place += self._choice(body["temperature"])
            texts.append(WORDS[place % 6])
            logprobs.append(math.log(law[texts[-1]]))
            tops.append({word: math.log(p) for word, p in [*law.items()][:5]})
        self.open -= 1
        if self.fault == "holes":
            for at in range(1, len(texts)):
                if texts[at] == max(tops[at], key=lambda word: tops[at][word]):
                    tops[at], logprobs[at] = {}, 0.0
        found: Any = {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops}
        if self.fault == "silent":
            found, texts = None, [f"{text} " for text in texts]
        reason = "length" if len(texts) == body["max_tokens"] else "stop"
        choice = {"text": "".join(texts), "finish_reason": reason, "logprobs": found}
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
                has_logprobs=server.fault != "silent",
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


def test_a_server_without_log_probabilities_of_accepted_drafts_is_sound() -> None:
    """Those that remain were selected by the token that was emitted."""
    report = run(Server("holes"))
    assert failed(report) == [], report.table()
    bet = next(check for check in report.checks if check.name == "the likeliest token")
    assert bet.figures["trials"] == 250  # the first token of each reply
    assert "only the first token" in report.table()


def test_the_token_that_ends_a_reply_need_not_be_reported() -> None:
    report = run(Server("ends"))
    assert failed(report) == [], report.table()
    bet = next(check for check in report.checks if check.name == "the likeliest token")
    assert bet.figures["trials"] > 500 and abs(bet.figures["bias"]) < 0.06


def test_without_log_probabilities_words_are_compared() -> None:
    report = run(Server("silent"), Server("silent"))
    assert failed(report) == [] and len(report.checks) == 6, report.table()
    assert {"word 1", "word 2", "word 3"} <= {check.name for check in report.checks}

    class Lossy(Server):
        def _choice(self, temperature: float) -> int:
            is_wrong = temperature and self.draw.random() < 0.3
            return 4 if is_wrong else super()._choice(temperature)

    assert any(name.startswith("word ") for name in failed(run(Lossy("silent"), Server("silent"))))


def test_a_difference_without_log_probabilities_is_no_verdict() -> None:
    ours = [Tokens(["a", "b"], [0.0, 0.0], [{}, {}])]
    theirs = [Tokens(["a", "c"], [0.0, 0.0], [{}, {}])]
    report = Report({})
    judge_greedy("one request at a time", ours, theirs, report)
    assert report.checks[0].status == "note" and "1 differ where no log" in report.table()


@pytest.mark.parametrize(
    ("ours", "expected"),
    [(["a", "b"], 0.1), (["a", "c"], 3.0), (["a", "d"], math.inf), (["a"], 0.1)],
)
def test_a_gap_is_that_of_the_reference(ours: list[str], expected: float) -> None:
    row = {"x": -0.5, "b": -0.6, "c": -3.5}
    theirs = Tokens(["a", "x"], [0.0, -0.5], [{}, row])
    assert gap(Tokens(ours, [], []), theirs, 1) == pytest.approx(expected)
    assert gap(Tokens(ours, [], []), theirs, 0) is None


def test_unknown_likeliest_tokens_are_asked_for_again() -> None:
    """The reference ends where ours goes on, and no server reports the token that ends a reply."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        top = {"</s>": -0.7, " c": -0.8}
        found = {"tokens": ["</s>"], "token_logprobs": [-0.7], "top_logprobs": [top]}
        return httpx.Response(200, json={"choices": [{"text": "", "logprobs": found}]})

    async def check() -> Tokens:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            ours, theirs = (
                Tokens(["a", "b", " c"], [], []),
                Tokens(["a", "b"], [0.0, 0.0], [{}, {}]),
            )
            return await ask_again(Endpoint(client, "m"), "prompt ", ours, theirs)

    known = asyncio.run(check())
    assert asked[0]["prompt"] == "prompt ab" and asked[0]["max_tokens"] == 1
    assert gap(Tokens(["a", "b", " c"], [], []), known, 2) == pytest.approx(0.1)


def test_greedy_text_that_depends_on_the_load_is_found() -> None:
    report = run(Server("under load"))
    assert failed(report) == ["all requests at once"]
    assert "differ: prompt" in report.table()


def test_log_probabilities_are_read_in_both_formats() -> None:
    row = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    assert Tokens.of({"logprobs": {"content": [row]}}) == Tokens(["a"], [-0.5], [{"a": -0.5}])
    words = Tokens.of({"text": " two  words\n", "logprobs": None})
    assert words.texts == [" two", "  words", "\n"] and words.top == [{}, {}, {}]
    assert Tokens(["a", "b c"], [0.0, 0.0], [{}, {}]).words.texts == ["ab", " c"]


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
