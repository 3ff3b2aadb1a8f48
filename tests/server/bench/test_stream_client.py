"""The client of `bench serve`: what it reads from a socket, keeps, and reports as broken."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from slipstream.server.bench.stream_client import Reply, StreamClient, StreamFailed, _Connection

from .sse_server import Answer, Request, serving


class _Silent(asyncio.Transport):
    """A connection that nobody reads."""

    def write(self, data: object) -> None:
        """Forget it."""

    def abort(self) -> None:
        """There is nothing to end."""


PIECES = (b"data: one\n\n", b"data: two\n\n")


async def ask(client: StreamClient, body: bytes = b"{}") -> tuple[Reply, list[bytes]]:
    pieces: list[bytes] = []

    def take(data: bytes) -> bool:
        pieces.append(data)
        return True

    return await client.post(body, take), pieces


@pytest.mark.parametrize("framing", ["chunked", "length", "connection"])
async def test_bodies_are_read_in_every_framing(framing: str) -> None:
    def answer(_: Request) -> Answer:
        return Answer(PIECES, framing=framing, seconds=0.02)

    async with (
        serving(answer) as server,
        StreamClient(f"{server.url}/a%20b?c=1", {}, 5.0) as client,
    ):
        for _ in range(2):
            reply, pieces = await ask(client, b'{"x": 1}')
            assert reply == Reply(200) and pieces == list(PIECES)
        assert server.num_connections == (2 if framing == "connection" else 1)
        assert {(r.method, r.path, r.body) for r in server.requests} == {
            ("POST", "/a%20b?c=1", b'{"x": 1}')
        }


async def test_a_chunk_costs_little_cpu_time() -> None:
    """Per second of one core, a client reads more than 5,000 chunks that come one at a time."""
    from slipstream.server.bench.serve import _Reading

    chunk = b'data: {"id": "c", "choices": [{"index": 0, "text": " word", "logprobs": null}]}\n\n'
    framed = b"%x\r\n%s\r\n" % (len(chunk), chunk)
    connection, reading = _Connection(), _Reading()
    connection.connection_made(_Silent())
    asked = asyncio.ensure_future(connection.ask(b"", reading.take, 60.0))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    began = time.process_time()
    for _ in range(2000):
        connection.data_received(framed)
    seconds = time.process_time() - began
    connection.data_received(b"0\r\n\r\n")
    assert (await asked).status == 200 and len(reading.outcome.gaps) == 1999
    assert seconds < 2000 / 20_000, f"{2000 / seconds:.0f} chunks a second"


async def test_headers_are_sent_and_a_reply_with_an_error_is_kept() -> None:
    def answer(_: Request) -> Answer:
        return Answer((b'{"error": ', b'"full"}'), status=503)

    async with serving(answer) as server:
        async with StreamClient(server.url, {"Authorization": "Bearer k"}, 5.0) as client:
            reply, pieces = await ask(client)
    assert reply == Reply(503, b'{"error": "full"}') and pieces == []
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer k" and request.path == "/"
    assert request.headers["host"] == server.url.removeprefix("http://")
    assert request.headers["content-type"] == "application/json"


async def test_requests_at_once_have_a_connection_each() -> None:
    async with serving(lambda _: Answer(PIECES, seconds=0.02)) as server:
        async with StreamClient(server.url, {}, 5.0) as client:
            for _ in range(2):
                found = await asyncio.gather(*(ask(client) for _ in range(5)))
                assert [pieces for _, pieces in found] == [list(PIECES)] * 5
            assert server.num_connections == 5


async def test_who_takes_no_more_ends_the_request() -> None:
    async with serving(lambda _: Answer(PIECES * 100, seconds=0.01)) as server:
        async with StreamClient(server.url, {}, 5.0) as client:
            pieces: list[bytes] = []
            await client.post(b"{}", lambda data: pieces.append(data) or False)  # type: ignore[func-returns-value]
            assert pieces == [PIECES[0]]
            await ask(client)
            assert server.num_connections == 2  # the first could still send


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Answer(raw=b"SSH-2.0-OpenSSH\r\n"), "the reply is not HTTP"),
        (Answer(PIECES, breaks=True), "closed the connection within a reply"),
        (Answer((b"a",), framing="length", headers="content-length: 9\r\n"), "not HTTP"),
        (Answer(PIECES, seconds=30), "no data for 0.3 s"),
    ],
)
async def test_a_broken_reply_is_one_sentence(reply: Answer, words: str) -> None:
    async with serving(lambda _: reply) as server, StreamClient(server.url, {}, 0.3) as client:
        with pytest.raises(StreamFailed, match=words):
            await ask(client)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_connection_that_the_server_closed_is_opened_again(is_late: bool) -> None:
    """As at the end of its keep-alive; late: while the request is on its way."""
    replies = iter([Answer(PIECES, breaks=False), Answer(closes=True), Answer(PIECES)])
    async with serving(lambda _: next(replies)) as server:
        async with StreamClient(server.url, {}, 5.0) as client:
            assert (await ask(client))[1] == list(PIECES)
            if not is_late:
                next(replies)
                for connection in client._idle:
                    connection.close()
                await asyncio.sleep(0.05)
            assert (await ask(client))[1] == list(PIECES)
            assert server.num_connections == 2


async def test_a_connection_without_a_reply_is_an_error() -> None:
    async with serving(lambda _: Answer(closes=True)) as server:
        async with StreamClient(server.url, {}, 5.0) as client:
            with pytest.raises(StreamFailed, match="closed the connection without a reply"):
                await ask(client)


async def test_without_a_server_the_reason_is_named() -> None:
    async with StreamClient("http://127.0.0.1:9/v1", {}, 5.0) as client:
        with pytest.raises(StreamFailed, match="cannot connect: .*refused|cannot connect"):
            await ask(client)


async def test_tls_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with serving(lambda _: Answer(PIECES), context) as server:
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        async with StreamClient(url, {}, 5.0) as client:
            with pytest.raises(StreamFailed, match="cannot connect: .*certificate"):
                await ask(client)
        trusting = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(httpx, "create_ssl_context", lambda: trusting)
        async with StreamClient(url, {}, 5.0) as client:
            assert (await ask(client))[1] == list(PIECES)
