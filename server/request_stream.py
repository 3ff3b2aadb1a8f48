"""Owns the way of one request's outputs from the dispatcher to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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


class RequestStream:
    """Async iterator of a request's outputs; ends after the one that carries a finish reason.

    Raises EngineDead once the worker is gone, after what arrived before. One reader. Putting never
    waits, so a slow reader delays nobody: what it has not read is bounded by its own `max_tokens`.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: deque[RequestOutput] = deque()
        self._news = asyncio.Event()
        self._error: EngineDead | None = None
        self._take: Callable[[list[RequestOutput]], bool] | None = None
        self._fault: Exception | None = None  # of `_take`
        self._ended = False  # nothing more will be put

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        self._outputs.append(output)
        self._ended = self._ended or output.finish_reason is not None
        if self._take is None:
            self._news.set()
        elif len(self._outputs) == 1:
            asyncio.get_running_loop().call_soon(self._deliver)

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

    def _deliver(self) -> None:
        if self._take is None:
            return  # nobody follows any more: the reader finds it
        outputs, more = self._outputs, True
        batch: list[RequestOutput] = []
        while outputs and outputs[0].finish_reason is None:
            batch.append(outputs.popleft())
        try:
            more = not batch or self._take(batch)
        except Exception as error:  # the reader's, not the event loop's
            more, self._fault = False, error
        if not more or outputs:
            self._take = None
            self._news.set()

    def pop(self) -> RequestOutput | None:
        """The next output if it is there already."""
        return self._outputs.popleft() if self._outputs else None

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
