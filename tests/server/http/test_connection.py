"""Bytes on a real socket: slow, silent, huge and odd clients, and what each of them is told."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from slipstream.server.http.connection import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    _most_connections,
)
from slipstream.server.startup.launch import _uvicorn_config, bind

from ..api_fakes import MODEL, ScriptedEngine, config_with, make_app, reply_with

BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 50}).encode()


def post(*headers: str, body: bytes = BODY, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def serving(
    engine: ScriptedEngine | None = None, **server: Any
) -> AsyncIterator[Callable[[], Any]]:
    """A server; calling what it gives connects to it, as (reader, writer)."""
    config = config_with(port=0, **server)
    app = make_app(engine or ScriptedEngine(), config)
    with bind(config.server) as listener:
        listener.listen()
        running = uvicorn.Server(_uvicorn_config(config, app))
        task = asyncio.create_task(running._serve([listener]))
        writers: list[asyncio.StreamWriter] = []

        async def connect(**options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*listener.getsockname(), **options)
            writers.append(writer)
            return reader, writer

        while not running.started:
            await asyncio.sleep(0.01)
        try:
            yield connect
        finally:
            for writer in writers:
                writer.close()
            await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)
            running.should_exit = True
            await asyncio.wait_for(task, 10)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next response: status, headers, body."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body


async def closed(reader: asyncio.StreamReader, seconds: float = 5) -> bytes:
    """What comes until the server closes."""
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    except ConnectionResetError:
        return b""


async def refused(reader: asyncio.StreamReader, status: int) -> dict[str, Any]:
    """The error object of a refusal, after which the connection is closed."""
    got, headers, body = await answer(reader)
    assert got == status and headers["connection"] == "close"
    assert await closed(reader) == b""
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


async def nothing_open(engine: ScriptedEngine) -> None:
    """The engine's requests end within a second."""
    deadline = asyncio.get_running_loop().time() + 1
    while engine.open:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


@contextmanager
def small_socket(size: int) -> Iterator[socket.socket]:
    """A socket whose kernel takes little before its program reads."""
    with closing(socket.socket()) as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        yield small


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nA: b\r\n"])
async def test_head_that_does_not_come_is_cut(sent: bytes) -> None:
    async with serving(client_timeout=0.3) as connect:
        reader, writer = await connect()
        writer.write(sent)
        if sent:
            assert (await refused(reader, 408))["code"] == "request_timeout"
        else:
            assert await closed(reader) == b""


async def test_dribbled_head_is_cut_though_bytes_keep_coming() -> None:
    async with serving(client_timeout=0.4) as connect:
        reader, writer = await connect()
        began = asyncio.get_running_loop().time()
        task = asyncio.create_task(closed(reader))
        for byte in b"GET /health HTTP/1.1\r\nHost: example.org\r\nX: " + b"y" * 60:
            if task.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        assert await task == b"" or b" 408 " in task.result()  # a reset may overtake the reply
        assert asyncio.get_running_loop().time() - began < 1.2


async def test_second_request_on_a_connection_has_the_same_limit() -> None:
    async with serving(client_timeout=0.4) as connect:
        reader, writer = await connect()
        for _ in range(3):  # together they take longer than the time-out, each takes less
            writer.write(b"GET /health HT")
            await asyncio.sleep(0.2)
            writer.write(b"TP/1.1\r\n\r\n")
            assert (await answer(reader))[0] == 200
        writer.write(b"GET /health HT")
        assert await closed(reader, 2) == b""


async def test_dribbled_body_is_a_408_and_reaches_no_engine() -> None:
    engine = ScriptedEngine()
    async with serving(engine, client_timeout=0.3) as connect:
        reader, writer = await connect()
        writer.write(post()[:-5])
        assert (await refused(reader, 408))["code"] == "request_timeout"
    assert not engine.requests


async def test_body_that_no_route_reads_is_cut_too() -> None:
    async with serving(client_timeout=0.3) as connect:
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        assert (await answer(reader))[0] == 200
        task = asyncio.create_task(closed(reader, 3))
        while not task.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
        assert await task == b""


async def test_without_a_time_out_slow_clients_are_waited_for() -> None:
    async with serving(client_timeout=0) as connect:
        reader, writer = await connect()
        for part in (post()[:9], post()[9:-5], post()[-5:]):
            await asyncio.sleep(0.2)
            writer.write(part)
        assert (await answer(reader))[0] == 200


async def test_client_that_does_not_read_is_cut_and_its_request_aborted() -> None:
    engine = ScriptedEngine(reply_with("abcdefgh" * 100, run=1, eos=False))
    async with serving(engine, client_timeout=0.5) as connect:
        with small_socket(4096) as small:
            _, writer = await connect()
            small.connect(writer.get_extra_info("peername"))
            body = {"model": MODEL, "prompt": ["x"] * 60, "max_tokens": 500, "stream": True}
            small.sendall(post(body=json.dumps({**body, "logprobs": 5}).encode()))
            reader, writer = await connect()
            for _ in range(100):
                writer.write(post())
                assert (await answer(reader))[0] == 200  # others are served meanwhile
                if len(engine.requests) > 60 and not engine.open:
                    break
                await asyncio.sleep(0.05)
            assert not engine.open
            await asyncio.sleep(1.0)
            small.settimeout(5)
            received = b""
            with suppress(ConnectionResetError):
                while chunk := small.recv(1 << 20):
                    received += chunk
            assert b"[DONE]" not in received and len(received) < 3 << 20  # what the kernel held


async def test_client_that_reads_slowly_is_not_cut() -> None:
    engine = ScriptedEngine(reply_with("abcdefgh" * 100, run=1, eos=False))
    async with serving(engine, client_timeout=0.6) as connect, AsyncExitStack() as stack:
        small = stack.enter_context(small_socket(16384))
        small.connect((await connect())[1].get_extra_info("peername"))
        reader, writer = await asyncio.open_connection(sock=small, limit=1024)
        body = {"model": MODEL, "prompt": ["x"] * 10, "max_tokens": 400, "stream": True}
        writer.write(post(body=json.dumps({**body, "logprobs": 5}).encode()))
        text, loop = b"", asyncio.get_running_loop()
        began = loop.time()
        while b"[DONE]" not in text:
            chunk = await asyncio.wait_for(reader.read(60_000), 2)
            assert chunk, "cut"
            text += chunk
            await asyncio.sleep(0.02)
        assert loop.time() - began > 0.8  # twice the time-out
        writer.close()


async def test_endless_headers_are_a_431() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            for number in range(4 * MAX_HEAD_BYTES // 1000):
                writer.write(b"X-%d: " % number + b"y" * 1000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
                if reader.at_eof() or writer.transport.is_closing():
                    raise ConnectionResetError
        _, writer = await connect()
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES)
        await asyncio.sleep(0.1)
        writer.write(b"y" * 2000)
        assert (await refused(reader, 431))["code"] == "headers_too_large"


@pytest.mark.parametrize("packets", [1, 2, 3])
@pytest.mark.parametrize(("excess", "status"), [(-100, 200), (1, 431)])
async def test_the_size_of_headers_counts_however_they_come(
    packets: int, excess: int, status: int
) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX: "
    value = b"y" * (MAX_HEAD_BYTES - len("/healthHostxX") - 8 + excess)
    text = head + value + b"\r\n\r\n"
    async with serving() as connect:
        reader, writer = await connect()
        for part in range(packets):
            writer.write(text[part * len(text) // packets : (part + 1) * len(text) // packets])
            await writer.drain()
            await asyncio.sleep(0.05)
        line = await asyncio.wait_for(reader.readline(), 5)
        assert int(line.split()[1]) == status
        writer.close()


async def test_idle_connections_give_way_and_busy_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.server.http.connection._most_connections", lambda: 3)
    engine = ScriptedEngine(lambda r: [*reply_with()(r)[:2], float("inf")])
    async with serving(engine) as connect:
        busy = [await connect()]
        busy[0][1].write(post())
        while not engine.open:
            await asyncio.sleep(0.01)
        idle = [await connect() for _ in range(4)]
        for reader, _ in idle[:2]:  # the oldest
            assert await closed(reader) == b""
        for count in (2, 3):  # the others are served
            busy.append(idle[count])
            busy[-1][1].write(post())
        while len(engine.open) < 3:
            await asyncio.sleep(0.01)
        got, _, body = await answer((await connect())[0])
        assert got == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
        assert len(engine.open) == 3
        busy[0][1].close()
        while len(engine.open) == 3:
            await asyncio.sleep(0.01)
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((1024, 1 << 20), MAX_CONNECTIONS, (MAX_CONNECTIONS + 256, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), MAX_CONNECTIONS, (MAX_CONNECTIONS + 256, -1)),
        ((1024, 2048), 1792, (2048, 2048)),
        ((256, 256), 128, (256, 256)),
        ((1 << 20, 1 << 20), MAX_CONNECTIONS, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), MAX_CONNECTIONS, None),
    ],
)
def test_connections_leave_files_for_all_else(
    limits: tuple[int, int],
    most: int,
    raised: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: found.append(pair))
    assert _most_connections() == most
    assert found == ([] if raised is None else [raised])


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("number", "status"), [(MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)])
async def test_the_number_of_headers_is_limited(number: int, status: int) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * number + b"\r\n")
        assert (await answer(reader))[0] == status


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (b"2\r\n{}\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
        (b"2\r\n{}\r\n0\r\nX: ", b"y" * 1000),
        (b"2;x=", b"y" * 1000),
    ],
    ids=["trailers", "a trailer", "an extension"],
)
async def test_what_comes_beside_a_body_is_limited(begun: bytes, piece: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(CHUNKED + begun)
        for _ in range(MAX_HEAD_BYTES // 1000 - 2):
            writer.write(piece)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert not reader.at_eof()  # so much is let through
        for _ in range(10):
            writer.write(piece)
        assert (await refused(reader, 431))["code"] == "headers_too_large"


async def test_a_trailer_is_no_header() -> None:
    """It may come with the head, before the request is looked at, and past a proxy's checks."""
    async with serving(api_key=("k",)) as connect:
        reader, writer = await connect()
        writer.write(CHUNKED + b"0\r\nAuthorization: Bearer k\r\n\r\n")
        assert (await answer(reader))[0] == 401
        key = b"\r\nAuthorization: Bearer k\r\n\r\n"
        body = b"%x\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY)
        writer.write(CHUNKED.replace(b"\r\n\r\n", key) + body)
        assert (await answer(reader))[0] == 200


async def test_the_number_of_pipelined_requests_is_limited() -> None:
    ask = b"GET /health HTTP/1.1\r\n\r\n"
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(ask * (MAX_PIPELINED + 1))
        assert [(await answer(reader))[0] for _ in range(MAX_PIPELINED + 1)] == [200] * 33
        reader, writer = await connect()
        writer.write(ask * (MAX_PIPELINED + 2))  # in one packet: one is answered, the others wait
        assert "32 pipelined requests" in (await refused(reader, 400))["message"]


async def test_bodies_of_all_requests_are_limited_together() -> None:
    """Sixteen of the largest size fit; what has ended does not count."""
    async with serving(max_body_bytes=1024) as connect:
        halves = []
        for _ in range(17):
            reader, writer = await connect()
            writer.write(post(body=b" " * 1024)[:-1])
            halves.append((reader, writer))
        statuses = []
        for reader, writer in halves[16:]:
            writer.write(b" ")
            statuses.append((await answer(reader))[0])
        assert statuses == [429]
        for reader, writer in halves[:16]:
            writer.write(b" ")
            assert (await answer(reader))[0] == 400  # a body without JSON
        reader, writer = await connect()
        writer.write(post())
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # TLS
        b"HELO example.org\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"\r\n" * 20 + b"\x00" * 20,
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_form(sent: bytes) -> None:
    async with serving(client_timeout=5) as connect:
        reader, writer = await connect()
        writer.write(sent)
        got, headers, body = await answer(reader)
        assert got == 400 and json.loads(body)["error"]["message"]
        reader, writer = await connect()
        writer.write(post())
        assert (await answer(reader))[0] == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(post() + b"GET /health HTTP/1.1\r\n\r\n" + post(path="/nowhere") + post())
        assert [(await answer(reader))[0] for _ in range(4)] == [200, 200, 404, 200]


async def test_hanging_up_on_pipelined_requests_leaves_nothing() -> None:
    engine = ScriptedEngine(lambda r: [*reply_with()(r)[:2], float("inf")])
    async with serving(engine) as connect:
        _, writer = await connect()
        writer.write(post() * 5)
        while not engine.open:
            await asyncio.sleep(0.01)
        writer.close()
        await nothing_open(engine)


async def test_expect_100_continue_is_answered_when_the_body_is_wanted() -> None:
    async with serving(max_body_bytes=2000) as connect:
        reader, writer = await connect()
        writer.write(
            post("Expect: 100-continue", body=b"")[:-2].replace(b": 0", b": %d" % len(BODY))
        )
        writer.write(b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await answer(reader))[0] == 200
        reader, writer = await connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9999\r\n")
        writer.write(b"Expect: 100-continue\r\n\r\n")
        assert (await answer(reader))[0] == 413  # and no invitation before


async def test_chunked_bodies_are_read_and_limited() -> None:
    async with serving(max_body_bytes=2000) as connect:
        reader, writer = await connect()
        head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head)
        for byte in BODY:
            writer.write(b"1;name=value\r\n%c\r\n" % byte)
        writer.write(b"0\r\nTrailer: x\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(head + b"7d1\r\n" + b" " * 2001 + b"\r\n")
        got, _, body = await answer(reader)
        assert got == 413 and json.loads(body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
async def test_compressed_bodies_are_a_clear_415(coding: str) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(post(f"Content-Encoding: {coding}"))
        got, _, body = await answer(reader)
        assert got == 415 and coding in json.loads(body)["error"]["message"]
        writer.write(post("Content-Encoding: identity"))
        assert (await answer(reader))[0] == 200


async def test_offer_of_http_2_is_declined_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as connect:
        for _ in range(2):
            reader, writer = await connect()
            offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
            writer.write(post(*offer))
            assert (await answer(reader))[0] == 200
    assert not [r for r in caplog.records if "pgrade" in r.getMessage()]


@pytest.mark.parametrize("keep_alive", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_1_0_gets_its_stream_without_chunks(path: str, keep_alive: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "stream": True}
    said = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    text = json.dumps(body | said).encode()
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(post(body=text, path=path))
        got, headers, expected = await answer(reader)
        assert got == 200 and headers["transfer-encoding"] == "chunked"
        reader, writer = await connect()
        old = post(keep_alive.rstrip() or "X: y", body=text, path=path)
        writer.write(old.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, whole = (await closed(reader)).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b" 200 " in lines[0] and b"connection: close" in lines
    assert not [line for line in lines if line.startswith((b"transfer-", b"content-length"))]
    assert whole.endswith(b"data: [DONE]\n\n") and events_of(whole) == events_of(expected)


def events_of(stream: bytes) -> str:
    """The text that a stream brings; every part of it must be an event."""
    parts = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n")]
    assert parts[-2:] == [b"[DONE]", b""]
    choices = [json.loads(part)["choices"][0] for part in parts[:-2]]
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    assert text
    return text


async def test_http_1_0_gets_a_whole_reply_with_its_length() -> None:
    async with serving() as connect:
        for request in (post(), b"HEAD /health HTTP/1.1\r\n\r\n", post(path="/nowhere")):
            reader, writer = await connect()
            writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = (await closed(reader)).partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert len(body) == (0 if request.startswith(b"HEAD") else length) and length > 0
            assert b"connection: close" in head and b"chunked" not in head


async def test_http_1_0_client_that_leaves_its_stream_is_noticed() -> None:
    engine = ScriptedEngine(lambda r: [*reply_with()(r)[:2], float("inf")])
    async with serving(engine) as connect:
        reader, writer = await connect()
        body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
        writer.write(post(body=body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await reader.readuntil(b"\n\n")
        writer.close()
        await nothing_open(engine)


async def test_half_closed_client_counts_as_gone() -> None:
    engine = ScriptedEngine(lambda r: [*reply_with()(r)[:2], float("inf")])
    async with serving(engine) as connect:
        reader, writer = await connect()
        writer.write(post())
        while not engine.open:
            await asyncio.sleep(0.01)
        writer.write_eof()
        assert await closed(reader) == b""
        await nothing_open(engine)
