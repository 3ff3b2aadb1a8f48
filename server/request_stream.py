"""Owns the way of one request's outputs from the dispatcher to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ..runner.messages import RequestOutput


class EngineDead(Exception):
    """The engine cannot serve: HTTP 503. The text is one sentence; try again in `retry_after` s."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShutDown(EngineDead):
    """The server ends, and has no more time for the request."""


class SpeculatorRefused(Exception):
    """The worker did not change its drafter. The text is one sentence."""


class OutputStream(Protocol):
    """What the routes use of a request's stream."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    def drain(self) -> list[RequestOutput]: ...

    async def follow(self, take: Callable[[list[RequestOutput]], bool]) -> None: ...


class Turn:
    """The streams that have news in one turn of the event loop; all are served at its end.

    One callback for all of them: one for each would cost as much as what it does.
    """

    def __init__(self) -> None:
        self._streams: list[RequestStream] = []

    def add(self, stream: RequestStream) -> None:
        """Serve this one, too."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._end)
        self._streams.append(stream)

    def _end(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.deliver()


class RequestStream:
    """Async iterator of a request's outputs; ends after the one that carries a finish reason.

    Raises EngineDead once the worker is gone, after what arrived before. One reader. Putting never
    waits, so a slow reader delays nobody: what it has not read is bounded by its own `max_tokens`.
    """

    def __init__(self, request_id: str, turn: Turn | None = None) -> None:
        """`turn` is shared by streams whose outputs come together."""
        self.request_id = request_id
        self._turn = turn or Turn()
        self._outputs: deque[RequestOutput] = deque()
        self._news = asyncio.Event()
        self._error: EngineDead | None = None
        self._take: Callable[[list[RequestOutput]], bool] | None = None
        self._fault: Exception | None = None  # of `_take`
        self._ended = False  # nothing more will be put

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        outputs = self._outputs
        outputs.append(output)
        if output.finish_reason is not None:
            self._ended = True
        if self._take is None:
            self._news.set()
        elif len(outputs) == 1:
            self._turn.add(self)

    async def follow(self, take: Callable[[list[RequestOutput]], bool]) -> None:
        """Call `take` with what was put in each turn of the event loop; cheaper than iteration.

        Returns when `take` says False, when the output that ends the request is there (which is
        left to the reader, as is all that follows), or at once if outputs wait already. Raises what
        `take` raises.
        """
        if self._outputs or self._ended:
            return
        self._news.clear()
        self._take = take
        try:
            await self._news.wait()
        finally:
            self._take = None
        if self._fault is not None:
            raise self._fault

    def deliver(self) -> None:
        """Give a follower what was put, up to the end; for `Turn`."""
        take, outputs = self._take, self._outputs
        if take is None:
            return  # nobody follows any more: the reader finds it
        batch = []
        while outputs and outputs[0].finish_reason is None:
            batch.append(outputs.popleft())
        try:
            more = not batch or take(batch)
        except Exception as error:  # the reader's, not the event loop's
            more, self._fault = False, error
        if not more or outputs:
            self._take = None
            self._news.set()

    def drain(self) -> list[RequestOutput]:
        """Take the outputs that are there already."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def fail(self, error: EngineDead) -> None:
        """End the stream with an error."""
        self._error = error
        self.close()

    def close(self) -> None:
        """End the stream."""
        self._ended = True
        self._news.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()
