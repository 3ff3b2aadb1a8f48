"""Sends mixed requests to a live server and records their outcomes, for all scripts here."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from running_server import RunningServer  # noqa: E402

__all__ = ["Outcome", "RunningServer", "at_rest", "mixed_request", "rest_of", "send"]

MODEL = "smollm2-135m"
WORDS = "the sea light house keeper storm boat night wave wind rock bird rope lamp door".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OPTIONS: list[dict[str, Any]] = [  # valid for chats and completions
    {},
    {},
    {"n": 3, "temperature": 0.9},
    {"stop": [" the", "\n", "ight"]},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"logit_bias": {"260": -100, "28": 5}, "seed": 7},
    {"temperature": 0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"ignore_eos": True, "min_tokens": 1},
    {"return_token_ids": True, "speculative": {"enabled": False}},
    {"structured_outputs": {"regex": "[a-f]{3,9}"}},
    {"structured_outputs": {"choice": ["left", "right", "straight on"]}},
]
CHAT_OPTIONS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 5},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
]
TEXT_OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 3, "echo": True},
    {"prompt_logprobs": 2, "stream": False},
    {"best_of": 3, "n": 2, "stream": False},
]


def text_of(chance: random.Random, words: int) -> str:
    """A text of `words` random words from a small vocabulary, so that the n-gram drafter drafts."""
    return " ".join(chance.choices(WORDS, k=words))


def mixed_request(chance: random.Random, max_tokens: int = 48) -> tuple[str, dict[str, Any]]:
    """Return a path and a valid body with a random prompt length and random options."""
    words = chance.choice((3, 10, 30, 30, 120))
    text = text_of(chance, words)
    if chance.random() < 0.3:
        text = f"{text_of(random.Random(1), 60)} {text}"  # a prefix that many requests share
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.randint(1, max_tokens),
        "stream": chance.random() < 0.6,
    }
    kind = chance.random()
    if kind < 0.45:
        message = {"role": "user", "content": text}
        options = chance.choice(OPTIONS + CHAT_OPTIONS)
        return "/v1/chat/completions", {**body, "messages": [message], **options}
    if kind < 0.9:
        prompt: Any = [text, text_of(chance, 5)] if chance.random() < 0.15 else text
        options = chance.choice(OPTIONS + TEXT_OPTIONS)
        return "/v1/completions", {**body, "prompt": prompt, **options}
    body["max_output_tokens"] = body.pop("max_tokens")
    return "/v1/responses", {**body, "input": text}


@dataclass
class Outcome:
    """How a request ended; times are those of `time.monotonic`."""

    path: str
    body: dict[str, Any]
    status: int = 0  # 0 if the connection broke before an answer
    end: str = "none"  # "done", "error", "dropped" (by this client) or "none" (it broke off)
    error: dict[str, Any] | None = None
    began: float = 0.0
    ended: float = 0.0

    def __str__(self) -> str:
        return f"{self.path} {self.status} {self.end} {self.error} {json.dumps(self.body)[:300]}"


async def send(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], drop_after: float | None = None
) -> Outcome:
    """Send a request and read its answer; disconnect after `drop_after` seconds if not None."""
    found = Outcome(path, body, began=time.monotonic())
    try:
        async with asyncio.timeout(drop_after):
            await (_stream if body.get("stream") is True else _whole)(http, found)
    except TimeoutError:
        found.end = "dropped"
    except httpx.TransportError as error:
        found.error = {"message": f"{type(error).__name__}: {error}"}
    found.ended = time.monotonic()
    return found


async def _whole(http: httpx.AsyncClient, found: Outcome) -> None:
    response = await http.post(found.path, json=found.body)
    found.status = response.status_code
    found.error = response.json().get("error") if response.content else None
    found.end = "done" if response.status_code == 200 else "error"


async def _stream(http: httpx.AsyncClient, found: Outcome) -> None:
    async with http.stream("POST", found.path, json=found.body) as response:
        found.status = response.status_code
        if response.status_code != 200:
            found.error = json.loads(await response.aread())["error"]
            found.end = "error"
            return
        async for data in events(response):
            if data == "[DONE]":
                found.end = "done"
                continue
            value = json.loads(data)
            kind = value.get("type", "")
            if kind in ("response.completed", "response.incomplete"):
                found.end = "done"
            elif kind == "response.failed":
                found.end, found.error = "error", value["response"]["error"]
            elif value.get("error"):
                found.end, found.error = "error", value["error"]


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream. httpx would also end a line at U+2028 and its kin, which JSON
    may hold as they are."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of each server-sent event."""
    async for line in _lines(response):
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def rest_of(server: RunningServer) -> dict[str, float]:
    """The metrics that must be 0 while no request runs."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: server.metric(name) for name in names}


def at_rest(server: RunningServer, seconds: float = 2.0) -> dict[str, float]:
    """Wait until no row or block is in use; returns the metrics that are not 0 after `seconds`.

    Blocks that only the prefix cache holds count as free.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = {name: value for name, value in rest_of(server).items() if value}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
