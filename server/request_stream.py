"""Owns the way of one request's outputs from the dispatcher to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections import deque

from ..runner.messages import RequestOutput


class EngineDead(Exception):
    """The engine cannot serve: HTTP 503. The text is one sentence; try again in `retry_after` s."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
        self._ended = False  # nothing more will be put

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        self._outputs.append(output)
        self._ended = self._ended or output.finish_reason is not None
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
