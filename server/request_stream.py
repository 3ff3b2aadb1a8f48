"""Streams of engine outputs, from the dispatcher of messages to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..runner.messages import RequestOutput


class EngineDead(Exception):
    """The engine cannot serve requests (HTTP 503). The message is one sentence.

    Clients should retry after `retry_after` seconds.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShutDown(EngineDead):
    """The server is shutting down before the request has finished."""


class SpeculatorRefused(Exception):
    """The worker refused to change its drafter. The message is one sentence."""


class Turn:
    """The streams that received outputs in one turn of the event loop; delivers to all at its end.

    A single callback serves all streams, because a callback for each would cost as much as the
    delivery itself.
    """

    def __init__(self) -> None:
        self._streams: list[RequestStream] = []

    def add(self, stream: RequestStream) -> None:
        """Deliver this stream's outputs at the end of the turn."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._end)
        self._streams.append(stream)

    def _end(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.deliver()


class RequestStream:
    """Async iterator over a request's outputs, for one reader; ends after the final output.

    If the worker dies, iteration raises EngineDead after the outputs received so far. `put` never
    waits, so a slow reader delays no other request; unread outputs are bounded by the request's
    `max_tokens`.
    """

    def __init__(self, request_id: str, turn: Turn | None = None) -> None:
        """`turn` is shared by the streams of one engine."""
        self.request_id = request_id
        self.engine = 0  # the number of the engine that serves it
        self._turn = turn or Turn()
        self._outputs: deque[RequestOutput] = deque()
        self._news = asyncio.Event()
        self._error: EngineDead | None = None
        self._take: Callable[[list[RequestOutput]], bool] | None = None
        self._fault: Exception | None = None  # raised by `_take`
        self._ended = False  # no more outputs will arrive

    def put(self, output: RequestOutput) -> None:
        outputs = self._outputs
        outputs.append(output)
        if output.finish_reason is not None:
            self._ended = True
        if self._take is None:
            self._news.set()
        elif len(outputs) == 1:
            self._turn.add(self)

    async def follow(self, take: Callable[[list[RequestOutput]], bool]) -> None:
        """Call `take` with the outputs of each turn of the event loop; cheaper than iteration.

        Returns when `take` returns False, when the final output arrives, or at once if unread
        outputs exist. The final output and all later ones are left for iteration. Exceptions of
        `take` are raised here.
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
        """Pass the outputs before the final one to a follower; called by `Turn`."""
        take, outputs = self._take, self._outputs
        if take is None:
            return  # no follower any more; iteration yields the outputs
        batch = []
        while outputs and outputs[0].finish_reason is None:
            batch.append(outputs.popleft())
        try:
            more = not batch or take(batch)
        except Exception as error:  # raise it in the reader, not in the event loop
            more, self._fault = False, error
        if not more or outputs:
            self._take = None
            self._news.set()

    def drain(self) -> list[RequestOutput]:
        """Remove and return all unread outputs, without waiting."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def fail(self, error: EngineDead) -> None:
        self._error = error
        self.close()

    def close(self) -> None:
        """End the stream; iteration still yields the unread outputs first."""
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
