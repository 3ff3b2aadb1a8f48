"""How servers elsewhere are asked: by what each of them has of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from slipstream.server.verify.endpoint import NEUTRAL, Endpoint, RequestFailed, connect

Answer = Callable[[httpx.Request], httpx.Response]
REPLY = {"choices": [{"text": " 3", "logprobs": {"tokens": [" 3"]}}]}
CHAT = {"choices": [{"message": {"reasoning_content": "so", "content": " 3"}, "logprobs": {}}]}


async def connected(answer: Answer, model: str | None = None) -> tuple[Endpoint, dict[str, Any]]:
    """How a server is asked, and its reply to one more prompt."""
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        found = await connect(client, model)
        return found, await found.complete("a", logprobs=5, max_tokens=2)


def body(request: httpx.Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.content)
    return found


def plain(request: httpx.Request) -> httpx.Response:
    """vLLM, SGLang, llama.cpp and this server: unknown fields are no error."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
    assert body(request).items() >= NEUTRAL.items()
    return httpx.Response(200, json=REPLY)


def strict(request: httpx.Request) -> httpx.Response:
    """OpenAI's own server refuses fields that it does not know."""
    if set(body(request)) & set(NEUTRAL):
        error = {"message": "Unrecognized request argument supplied: top_k"}
        return httpx.Response(400, json={"error": error})
    return httpx.Response(200, json=REPLY)


def without_logprobs(request: httpx.Request) -> httpx.Response:
    if "logprobs" in body(request):
        return httpx.Response(422, json={"detail": "logprobs"})
    return httpx.Response(200, json={"choices": [{"text": " 3"}]})


def silent(request: httpx.Request) -> httpx.Response:
    """It accepts the parameter and reports nothing."""
    return httpx.Response(200, json={"choices": [{"text": " 3", "logprobs": None}]})


def chats_only(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/completions":
        return httpx.Response(404, text="no such route")
    asked = body(request)
    assert asked["messages"][0]["role"] == "user" and "prompt" not in asked
    assert asked.get("logprobs", True) is True and asked.get("top_logprobs", 5) == 5
    return httpx.Response(200, json=CHAT)


def test_the_first_model_is_asked_with_neutral_options() -> None:
    found, reply = asyncio.run(connected(plain))
    assert found.model == "first" and found.extra == NEUTRAL and reply["choices"][0]["text"] == " 3"
    assert not found.is_chat and found.has_logprobs


@pytest.mark.parametrize(
    ("answer", "extra", "is_chat", "has_logprobs"),
    [
        (strict, {}, False, True),
        (without_logprobs, NEUTRAL, False, False),
        (silent, NEUTRAL, False, False),
        (chats_only, NEUTRAL, True, False),
    ],
)
def test_servers_that_have_less_are_asked_for_less(
    answer: Answer, extra: dict[str, Any], is_chat: bool, has_logprobs: bool
) -> None:
    found, reply = asyncio.run(connected(answer, "m"))
    assert (found.extra, found.is_chat, found.has_logprobs) == (extra, is_chat, has_logprobs)
    assert reply["choices"][0]["text"] == ("so 3" if is_chat else " 3")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (httpx.Response(503, json={"error": {"message": "Loading model"}}), "503: Loading model"),
        (httpx.Response(401, json={"error": "bad key"}), "401: bad key; pass the key with --api"),
        (httpx.Response(404, text="none"), "http://x lists no model; name it"),
        (httpx.Response(200, json={"data": []}), "http://x lists no model; name it"),
        (httpx.Response(200, text="<html>"), "http://x lists no model; name it"),
    ],
)
def test_a_server_that_cannot_be_checked_says_why(reply: httpx.Response, words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        asyncio.run(connected(lambda _: reply))


def test_the_last_refusal_is_reported() -> None:
    refusal = httpx.Response(400, json={"error": {"message": "no model m"}})
    with pytest.raises(RequestFailed, match="HTTP 400: no model m"):
        asyncio.run(connected(lambda _: refusal, "m"))
