"""A server of a few lines for the tests of `bench serve`'s client: it sends what it is told to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What the server sends."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    seconds: float = 0.0  # before each piece
    framing: str = "chunked"  # or "length", "connection" (the body ends with the connection)
    raw: bytes = b""  # sent in place of a reply, after which the connection ends
    closes: bool = False  # whether the connection ends without a reply
    breaks: bool = False  # whether the connection ends before the body does
    headers: str = ""


@dataclass
class SseServer:
    """A running server: its URL, and what it was asked."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0


@asynccontextmanager
async def serving(
    answer: Callable[[Request], Answer], tls: ssl.SSLContext | None = None
) -> AsyncIterator[SseServer]:
    """Serve on a free port of this machine until the end of the context."""
    found = SseServer()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.num_connections += 1
        try:
            while await _one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = first.split()
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        found.requests.append(Request(method, path, headers, body))
        reply = answer(found.requests[-1])
        if reply.closes:
            return False
        if reply.raw:
            writer.write(reply.raw)
            await writer.drain()
            return False
        is_chunked = reply.framing == "chunked"
        head = f"HTTP/1.1 {reply.status} Answer\r\n{reply.headers}"
        if is_chunked:
            head += "transfer-encoding: chunked\r\n"
        elif reply.framing == "length":
            head += f"content-length: {sum(map(len, reply.pieces))}\r\n"
        writer.write(f"{head}\r\n".encode())
        for piece in reply.pieces:
            await asyncio.sleep(reply.seconds)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            await writer.drain()
        if is_chunked and not reply.breaks:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not reply.breaks and reply.framing != "connection"

    async with await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls) as server:
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found
