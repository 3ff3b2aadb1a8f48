"""Server-sent events as an ASGI response, which stops its source when the client disconnects.

This module knows neither OpenAI's formats nor the engine.
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
MAX_SILENT_TOKENS = 8  # tokens without text after which an empty chunk is sent as a sign of life
WRITER = "slipstream.writer"  # ASGI extension with a Writer, if the server offers it
Write = Callable[[bytes], bool]
Live = Callable[[Write], Awaitable[None]]
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Writer(Protocol):
    """Writes to a response that has begun, without waiting."""

    def may_write(self) -> bool:
        """Whether more can be written without waiting."""

    def write(self, data: bytes) -> bool:
        """Send it; returns `may_write`."""


def event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event with this data and, optionally, a name."""
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class KeepAlive:
    """A `Writer` that writes a comment whenever the stream has been silent for `seconds`, for
    example while its request is queued or its prompt is computed, so that clients and proxies do
    not give it up.

    A context. Without a writer, or with 0 seconds, it writes no comments. Pieces that are sent past
    it must be reported (`sent`).
    """

    def __init__(self, writer: Writer | None, seconds: float) -> None:
        self._writer, self._seconds = writer, seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        self._last = self._loop.time()

    def may_write(self) -> bool:
        """Whether there is a writer and the client keeps up."""
        return self._writer is not None and self._writer.may_write()

    def write(self, data: bytes) -> bool:
        assert self._writer is not None
        self._last = self._loop.time()
        return self._writer.write(data)

    def _wake(self) -> None:
        if self._loop.time() - self._last >= self._seconds and self.may_write():
            self.write(KEEP_ALIVE)
        due = max(self._last + self._seconds, self._loop.time() + 0.01)
        self._timer = self._loop.call_at(due, self._wake)

    def __enter__(self) -> KeepAlive:
        if self._writer is not None and self._seconds:
            self._timer = self._loop.call_later(self._seconds, self._wake)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EventStream(Response):
    """Sends the framed events that `events` yields; an error is framed by `failed` and sent last.

    `owner` is a context that is left when the response ends: at the end of `events`, after an
    error, or when the client disconnects, which cancels sending at once.

    After each piece of `events`, `live` may write later events directly while the client keeps up;
    then `events` continues. A piece must therefore contain everything available so far, or later
    events could overtake the rest.
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
                with KeepAlive(writer, self._keep_alive) as alive:
                    async with aclosing(self._events) as events:
                        async for chunk in events:
                            body = {"type": "http.response.body", "body": chunk, "more_body": True}
                            await send(body)
                            alive.sent()
                            if self._live and alive.may_write():
                                await self._live(alive.write)
        except Exception as error:
            last = self._failed(as_api_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`. If the client disconnects, cancel it and raise ClientDisconnect."""

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
