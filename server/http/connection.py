"""A client's HTTP connection, with time-outs and limits that uvicorn's protocol does not have.

uvicorn waits forever for a client that has started a request or is receiving a reply. This class
disconnects clients that send their request too slowly or do not read their reply. One timer per
connection checks for both a few times within the time-out.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import APIError, HeadTooLarge, MalformedRequest, RequestTooSlow, error_body
from .sse import WRITER

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
MAX_CONNECTIONS = 8192
_OTHER_FILES = 256  # file descriptors reserved for everything but connections
MAX_PIPELINED = 32  # requests that may wait on a connection while one is being answered
_HEAD_LIMIT = f"{MAX_HEAD_BYTES >> 10} KiB"
_TOO_MANY = f"More than {MAX_PIPELINED} pipelined requests wait for an answer on this connection."
_LOOKS = 4  # checks within one time-out
_WITHOUT_CHUNKS = ("0.9", "1.0")  # HTTP versions without chunked encoding


class TooManyConnections(APIError):
    """The maximum number of connections is open, and each has a request."""

    status = 503
    type = "service_unavailable"
    code = "too_many_connections"

    def __init__(self) -> None:
        super().__init__("The server has no free connection. Try again in 1 s.")


class _ChunkWriter:
    """Writes chunks of a reply directly to the socket, bypassing ASGI and uvicorn."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def may_write(self) -> bool:
        """Whether the reply is chunked and unfinished, and the client keeps up with reading."""
        cycle = self._cycle
        open_ = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return bool(open_ and cycle.chunked_encoding and not cycle.flow.write_paused)

    def write(self, data: bytes) -> bool:
        """Send a chunk; returns False if the next one must wait."""
        cycle = self._cycle
        if not cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return not (self._flow.write_paused or cycle.disconnected)


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """The application for a client older than HTTP/1.1, which has no chunked encoding.

    A reply without a content length is sent unchunked and ends when the connection is closed.
    """

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        ends_with_connection = False

        async def send_whole(message: Any) -> None:
            nonlocal ends_with_connection
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                ends_with_connection = b"content-length" not in names
                if ends_with_connection:
                    cycle.chunked_encoding = False
            elif ends_with_connection:
                # keeps uvicorn's length check satisfied
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return serve


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with time-outs, and with errors in OpenAI's form.

    The connection is closed if the client takes `timeout` seconds to send a request's head, to send
    the rest of a body after its reply has gone out (a route that waits for a body has a time-out of
    its own), or to read any byte of a reply. A request that was writing is then aborted, as after
    any disconnect.

    It also fixes two bugs of uvicorn. With pipelining, a disconnect is reported to the running
    request and not to the last one; and a request that offers an upgrade keeps its body.
    """

    def __init__(
        self, *arguments: Any, timeout: float = 0.0, most: int = MAX_CONNECTIONS, **options: Any
    ) -> None:
        """`timeout` is in seconds, 0 disables it. At most `most` connections are open at once."""
        super().__init__(*arguments, **options)
        self._timeout = timeout
        self._most = most
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._head_since: float | None = None  # when the unfinished head began
        self._head_bytes = 0  # bytes received of the unfinished head
        self._refusal: APIError | None = None  # the error for which a callback stopped the parser
        self._in_body = False  # between the end of a head and the end of its body
        self._got_body = False  # whether the present packet contained a part of a body
        self._framing_bytes = 0  # bytes received since the last part of the body
        self._unread: tuple[int, float] | None = None  # unread bytes, since when
        self._late_since: float | None = None  # since when a body still arrives after its reply
        self._running: RequestResponseCycle | None = None  # the request being served

    # --- what uvicorn calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio: a client has connected.

        Starts the timer, if there is a time-out. If too many connections are open, closes idle ones
        or refuses this one.
        """
        super().connection_made(transport)
        self._head_since = self._since = self.loop.time()
        if len(self.connections) > self._most:
            self._make_room()
        if self._timeout > 0:
            self._timer = self.loop.call_later(self._timeout / _LOOKS, self._look)

    def _make_room(self) -> None:
        """Close the oldest idle connections, or refuse this one if none is idle.

        Several are closed at once, because finding them is slow.
        """
        others = cast("set[Connection]", self.connections) - {self}
        idle = [c for c in others if c._has_answered and not c.transport.is_closing()]
        idle.sort(key=lambda connection: connection._since)
        for connection in idle[: 1 + len(idle) // 64]:
            connection.transport.close()
        if not idle:
            self._refuse(TooManyConnections())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: the connection is closed.

        Drops the requests that wait, and reports the disconnect to the running one, if its reply is
        unfinished.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: bytes have arrived.

        If they are not a valid request, or its head is too large, the client gets an error and the
        connection is closed; see `_refuse`.
        """
        began = self._head_since
        self._got_body = False
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or MalformedRequest())
            return
        if self._head_since is not None and self._head_since == began:
            self._head_bytes += len(data)
        self._framing_bytes = self._framing_bytes + len(data) if self._lacks_body else 0
        most = max(self._head_bytes, self._framing_bytes)
        if most > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(_HEAD_LIMIT))

    @property
    def _lacks_body(self) -> bool:
        """Whether a body is unfinished and the last packet held none of it, only chunk framing."""
        return self._in_body and not self._got_body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_since is None:  # for the first request, the time of connecting counts
            self._head_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header.

        Headers after the body (trailers) are dropped, because a proxy may not have checked them.
        """
        if self._head_since is None:
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop(HeadTooLarge(f"{MAX_HEADERS} headers"))

    def on_body(self, body: bytes) -> None:
        self._got_body = True
        super().on_body(body)

    def _stop(self, error: APIError) -> None:
        """Stop the parser from within a callback; the client gets `error`."""
        self._refusal = error
        raise ValueError(error.message)

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of a request's head.

        Stops the parser if the head is too large or too many requests wait on the connection.
        """
        self._head_since = None
        self._head_bytes = 0
        self._in_body = True
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:  # it came in few packets, which `_head_bytes` does not cover
            self._stop(HeadTooLarge(_HEAD_LIMIT))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(MalformedRequest(_TOO_MANY))
        if not self.parser.should_upgrade():  # else `_feed` parses it again without the offer
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cast(dict[str, Any], cycle.scope).setdefault("extensions", {})[WRITER] = _ChunkWriter(cycle)
        has_chunks = cycle.scope["http_version"] not in _WITHOUT_CHUNKS
        super()._start_asgi_task(cycle, app if has_chunks else _without_chunks(app, cycle))

    def _feed(self, data: bytes) -> None:
        """Parse bytes; offers to upgrade the protocol are ignored.

        Some clients offer HTTP/2 with every request. After such an offer the parser would treat the
        rest, body included, as another protocol, so the head is parsed again without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            line = self.parser.get_method() + b" " + self.url + b" HTTP/1.1\r\n"
            hidden = {b"upgrade", b"connection", b"http2-settings"}
            lines = [b"%s: %s\r\n" % each for each in self.headers if each[0] not in hidden]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(line + b"".join(lines) + b"\r\n" + rest)

    # --- time-outs --------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self.loop.time()
        if self._reads_nothing(now):
            self.transport.abort()  # `close` would wait for the unread bytes
            return
        if self._is_past(self._head_since, now) and not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(RequestTooSlow("request", self._timeout))
            else:
                self.transport.close()
        elif self._sends_for_nothing(now):
            self.transport.close()
        self._timer = self.loop.call_later(self._timeout / _LOOKS, self._look)

    def _is_past(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self._timeout

    def _reads_nothing(self, now: float) -> bool:
        """Whether the client has read nothing for `timeout` s, while no bytes were added."""
        size = self.transport.get_write_buffer_size()
        adds = not (self.flow.write_paused or self._has_answered or self.transport.is_closing())
        if not size or adds:
            self._unread = None
        elif self._unread is None or size + self._in_kernel() != self._unread[0]:
            self._unread = (size + self._in_kernel(), now)
        return self._unread is not None and self._is_past(self._unread[1], now)

    def _in_kernel(self) -> int:
        """Bytes in the kernel's send buffer that the client has not acknowledged; 0 if unknown."""
        try:
            from fcntl import ioctl
            from termios import TIOCOUTQ

            found = ioctl(self.transport.get_extra_info("socket"), TIOCOUTQ, bytes(4))
        except (ImportError, OSError, ValueError):
            return 0
        return int(struct.unpack("i", found)[0])

    def _sends_for_nothing(self, now: float) -> bool:
        """Whether a body still arrives `timeout` seconds after its reply went out."""
        if not (self._has_answered and self._running is not None and self._running.more_body):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        return self._is_past(self._late_since, now)

    @property
    def _has_answered(self) -> bool:
        return self._running is None or self._running.response_complete

    def _refuse(self, error: APIError) -> None:
        """Answer bytes that did not become a request with `error`, and close the connection.

        If a reply is being sent, only close.
        """
        if self._has_answered or (self._running and not self._running.response_started):
            body = error_body(error)
            head = (
                f"HTTP/1.1 {error.status} {error.reason}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def connection_factory(timeout: float) -> Any:
    """A factory of connections, for uvicorn's option `http`."""
    return partial(Connection, timeout=timeout, most=_most_connections())


def _most_connections() -> int:
    """The maximum number of connections that the limit on file descriptors allows.

    Raises the soft limit if possible.
    """
    try:
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    soft, hard = getrlimit(RLIMIT_NOFILE)
    if soft == RLIM_INFINITY or soft >= wanted:
        return MAX_CONNECTIONS
    raised = wanted if hard == RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):  # a container may forbid it
        setrlimit(RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return max(soft - _OTHER_FILES, soft // 2)
