"""Comments in silent streams: when they come, and that no client sees them as data."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from slipstream.configs.load import add_flags, load_config
from slipstream.configs.schema import ServerConfig
from slipstream.runner.messages import AddRequest, RequestOutput
from slipstream.server.http.sse import KEEP_ALIVE, WRITER, EventStream, Live, Write

from ..api_fakes import MODEL, ScriptedEngine, config_with, http_client, make_app, reply_with

SILENCE = 0.1


class Client:
    """Receives what a stream sends, through ASGI or through its writer."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.reads = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    def may_write(self) -> bool:
        return self.reads

    def write(self, data: bytes) -> bool:
        self.pieces.append(data)
        return self.reads

    async def run(self, gaps: list[float], keep_alive: float, live: Live | None = None) -> None:
        """Stream a piece after each gap."""

        async def events() -> AsyncGenerator[bytes, None]:
            for index, gap in enumerate(gaps):
                await asyncio.sleep(gap)
                yield b"data: %d\n\n" % index

        stream = EventStream(nullcontext(), events(), live, lambda error: b"failed", keep_alive)
        scope = {"type": "http", "extensions": {WRITER: self}}
        await stream(scope, self.receive, self.send)  # type: ignore[arg-type]


async def test_a_silent_stream_gets_a_comment_for_each_interval() -> None:
    client = Client()
    await client.run([3.5 * SILENCE, 0.0, 0.0], SILENCE)
    first = client.pieces.index(b"data: 0\n\n")
    assert client.pieces[:first] == [KEEP_ALIVE] * first and first >= 1
    data = [piece for piece in client.pieces if piece != KEEP_ALIVE]
    assert data == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_a_lively_stream_gets_none_and_0_turns_them_off() -> None:
    client = Client()
    await client.run([SILENCE / 2] * 30, 7.5 * SILENCE)  # longer than the interval
    await client.run([3 * SILENCE], 0.0)
    assert KEEP_ALIVE not in client.pieces


async def test_a_client_that_does_not_read_gets_none() -> None:
    client = Client()
    client.reads = False
    await client.run([3 * SILENCE], SILENCE)
    assert client.pieces == [b"data: 0\n\n", b""]


async def test_what_is_written_directly_counts_too() -> None:
    """Silence is measured from the last piece, whichever way it went."""

    async def live(write: Write) -> None:
        for _ in range(10):
            await asyncio.sleep(SILENCE / 5)
            write(b"data: live\n\n")
        await asyncio.sleep(2.5 * SILENCE)

    client = Client()
    await client.run([0.0], SILENCE, live)
    last = len(client.pieces) - 1 - client.pieces[::-1].index(b"data: live\n\n")
    assert KEEP_ALIVE in client.pieces[last:]
    assert client.pieces.count(b"data: live\n\n") == 10


async def test_no_timer_is_left() -> None:
    client = Client()
    await client.run([0.0], SILENCE)
    sent = len(client.pieces)
    await asyncio.sleep(3 * SILENCE)
    assert len(client.pieces) == sent


def test_httpx_reads_a_comment_as_a_line_of_its_own() -> None:
    text = (KEEP_ALIVE + b"data: 1\n\n").decode()
    lines = list(httpx.Response(200, text=text).iter_lines())
    assert lines[0].startswith(":") and "data: 1" in lines


@pytest.mark.parametrize(
    ("path", "body", "first_text"),
    [
        ("/v1/completions", {"prompt": "hi"}, '"text":"Hell"'),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            '"content":"Hell"',
        ),
        ("/v1/responses", {"input": "hi"}, "response.output_text.delta"),
    ],
)
async def test_a_request_that_is_queued_or_in_prefill_gets_comments_before_its_first_token(
    path: str, body: dict[str, Any], first_text: str
) -> None:
    """The engine is silent for four intervals, as it is while the request waits for its turn."""

    def late(request: AddRequest) -> list[RequestOutput | Exception | float]:
        return [4.5 * SILENCE, *reply_with()(request)]

    app = make_app(ScriptedEngine(late), config_with(sse_keep_alive=SILENCE))
    async with http_client(app) as client:
        reply = await client.post(path, json={"model": MODEL, "stream": True, **body})
    assert reply.status_code == 200
    before, found, after = reply.text.partition(first_text)
    assert found and before.count(KEEP_ALIVE.decode()) >= 1, reply.text
    assert KEEP_ALIVE.decode() not in after


def test_the_interval_is_a_flag_and_15_seconds_by_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert ServerConfig().sse_keep_alive == 15.0
    args = parser.parse_args(["--sse-keep-alive", "2.5"])
    assert load_config(args, {}).server.sse_keep_alive == 2.5
