"""Sends POST requests over HTTP/1.1 and hands on the bodies of the replies as they arrive.

A benchmark's client must cost little for each chunk, so there is no task, queue or event between
the socket and the function that takes the data.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import httpx

_MOST_KEPT = 64 << 10  # bytes of a reply with an error
Take = Callable[[bytes], bool]  # takes a piece of a body; False ends the request


class StreamFailed(Exception):
    """No reply, or a broken one; the message is one sentence."""


@dataclass(frozen=True)
class Reply:
    """How a request ended."""

    status: int
    body: bytes = b""  # of a status other than 200; the function got all others


class StreamClient:
    """A client of one URL; it keeps connections for further requests. A context.

    Proxies of the environment are not used, because they would be measured."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float) -> None:
        """`timeout`: seconds without data after which a request fails."""
        parts = urlsplit(url)
        self._timeout = timeout
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_tls else 80)
        self._tls: ssl.SSLContext | None = None
        self._idle: list[_Connection] = []
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {
            "host": parts.netloc.rpartition("@")[2], "accept": "*/*", "connection": "keep-alive",
            "content-type": "application/json",
        }  # fmt: skip
        lines |= {name.lower(): value for name, value in headers.items()}
        head = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
        self._head = "\r\n".join(head).encode("latin-1", "replace")

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, body: bytes, take: Take) -> Reply:
        """Send a request and pass the body of a reply with status 200 to `take`.

        Raises StreamFailed."""
        data = self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        while self._idle:
            connection = self._idle.pop()
            # The server may close an idle connection while the request is on its way.
            with contextlib.suppress(_Unanswered):
                return await self._ask(connection, data, take)
        try:
            return await self._ask(await self._connect(), data, take)
        except _Unanswered as error:
            raise StreamFailed(str(error)) from None

    async def _ask(self, connection: _Connection, data: bytes, take: Take) -> Reply:
        reply = await connection.ask(data, take, self._timeout)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def _connect(self) -> _Connection:
        if self._is_tls and self._tls is None:
            self._tls = httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        try:
            opening = loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
            _, connection = await asyncio.wait_for(opening, self._timeout)
        except TimeoutError:
            raise StreamFailed(f"no connection within {self._timeout:g} s") from None
        except OSError as error:
            raise StreamFailed(f"cannot connect: {error.strerror or error}") from None
        return connection


class _Unanswered(Exception):
    """The connection ended before the first byte of a reply."""


class _Connection(asyncio.Protocol):
    """A connection, with at most one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = None  # httptools.HttpResponseParser of the reply; None while idle
        self._done: asyncio.Future[Reply] | None = None
        self._take: Take = bool
        self._is_open = False
        self._status = 0
        self._kept = b""
        self._ends_with_connection = True  # the reply has neither a length nor chunks
        self._heard = 0.0  # time of the last data
        self.is_reusable = False

    async def ask(self, data: bytes, take: Take, timeout: float) -> Reply:
        """Send a request. Raises StreamFailed or _Unanswered."""
        if not self._is_open:
            raise _Unanswered("the server closed the connection")
        self._take, self._status, self._kept = take, 0, b""
        self._ends_with_connection, self.is_reusable = True, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = self._loop.create_future()
        self._heard = self._loop.time()
        self._transport.write(data)
        timer = self._loop.call_later(timeout, self._look, timeout)
        self._timer = timer
        try:
            return await self._done
        finally:
            self._timer.cancel()
            self._parser = self._done = None
            if not self.is_reusable:
                self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _look(self, timeout: float) -> None:
        silent = self._loop.time() - self._heard
        if silent >= timeout:
            self._fail(StreamFailed(f"no data for {timeout:g} s"))
        else:
            self._timer = self._loop.call_later(timeout - silent, self._look, timeout)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._status, self._kept))

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._is_open = transport, True

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()  # nothing was asked for
            return
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(StreamFailed(f"the reply is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = self.is_reusable = False
        if self._status and self._ends_with_connection and exc is None:
            self._finish()
        elif self._status:
            self._fail(StreamFailed("the server closed the connection within a reply"))
        else:
            self._fail(_Unanswered("the server closed the connection without a reply"))

    # --- httptools -------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._kept = (self._kept + body)[:_MOST_KEPT]
        elif not self._take(body):
            self._finish()

    def on_message_complete(self) -> None:
        if self._status >= 200 and self._done is not None and not self._done.done():
            self.is_reusable = self._is_open and self._parser.should_keep_alive()
            self._finish()
