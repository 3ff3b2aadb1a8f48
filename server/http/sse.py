"""Server-sent events as an ASGI response that ends its source when the client goes away.

It knows neither OpenAI's shapes nor the engine: bytes in, events out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import APIError, as_api_error

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
MAX_SILENT_TOKENS = 8  # without text, before a chunk without any shows that the stream lives
WRITER = "slipstream.writer"  # the scope's extension that holds a Writer, if the server has one
Write = Callable[[bytes], bool]
Live = Callable[[Write], Awaitable[None]]
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Writer(Protocol):
    """Writes a piece of a response that has begun, without waiting."""

    def may_write(self) -> bool:
        """Whether the client takes more at once."""
        ...

    def write(self, data: bytes) -> bool:
        """Send it; returns `may_write`."""
        ...


def event(data: bytes, name: str | None = None) -> bytes:
    """One event."""
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class KeepAlive:
    """Writes a comment whenever a stream has been silent for `seconds`, for example while its
    request is queued or its prompt is computed, so that clients and proxies do not give it up.

    A context. Each piece must be reported (`sent`) or written through it (`write`).
    """

    def __init__(self, writer: Writer, seconds: float) -> None:
        self._writer, self._seconds = writer, seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Note that a piece was sent."""
        self._last = self._loop.time()

    def write(self, data: bytes) -> bool:
        """Write a piece; returns `Writer.may_write`."""
        self._last = self._loop.time()
        return self._writer.write(data)

    def _wake(self) -> None:
        if self._loop.time() - self._last >= self._seconds and self._writer.may_write():
            self.write(KEEP_ALIVE)
        due = max(self._last + self._seconds, self._loop.time() + 0.01)
        self._timer = self._loop.call_at(due, self._wake)

    def __enter__(self) -> KeepAlive:
        self._timer = self._loop.call_later(self._seconds, self._wake)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EventStream(Response):
    """Sends what `events` yields, already framed; an error becomes what `failed` makes of it.

    `owner` is left when the response ends, however that happens: at the end of `events`, by an
    error, or because the client disconnected, which cancels the sending at once.

    `live` writes events by itself while nothing holds them up; `events` goes on behind them. So a
    piece of `events` holds all that was there to send: what came later could overtake the rest.
    """

    def __init__(
        self,
        owner: AbstractContextManager[object],
        events: AsyncGenerator[bytes, None],
        live: Live | None,
        failed: Callable[[APIError], bytes],
        keep_alive: float = 0.0,  # seconds of silence before a comment; 0 = never
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._owner = owner
        self._events = events
        self._live = live
        self._failed = failed
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the response."""
        sender = asyncio.current_task()
        assert sender is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            sender.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self._send(send, scope.get("extensions", {}).get(WRITER))
        except asyncio.CancelledError:
            if not gone:
                raise
            sender.uncancel()
        finally:
            watcher.cancel()

    async def _send(self, send: Send, writer: Writer | None) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        last = b""
        try:
            with self._owner:
                await send(start)
                if writer is None or not self._keep_alive:
                    write = None if writer is None else writer.write
                    await self._send_events(send, writer, write, lambda: None)
                else:
                    with KeepAlive(writer, self._keep_alive) as alive:
                        await self._send_events(send, writer, alive.write, alive.sent)
        except Exception as error:
            last = self._failed(as_api_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(
        self, send: Send, writer: Writer | None, write: Write | None, sent: Callable[[], None]
    ) -> None:
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                sent()
                if self._live and writer and write and writer.may_write():
                    await self._live(write)


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`; cancels it and raises ClientDisconnect when the client goes away."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
