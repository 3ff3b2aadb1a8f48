"""Runs a generation and answers with it, whole or as a stream; the same for every endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request, Response

from ..http.sse import EventStream, Live, unless_disconnected
from .generation import Generation
from .large_replies import encode_reply


class Reply(Protocol):
    """Turns a generation's events into one endpoint's shapes."""

    async def whole(self, generation: Generation) -> Any:
        """The reply once everything is there, as a msgspec struct."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events."""
        ...

    def live(self, generation: Generation) -> Live | None:
        """How those events are written while they come, where that can be."""
        ...


async def respond(
    request: Request, generation: Generation, reply: Reply, *, stream: bool, wait: bool
) -> Response:
    """Submit the generation and answer. `wait` keeps a stream's status open until its first event,

    because the engine may still refuse the request, as it does with a grammar that is none.
    """
    generation.submit()
    if stream and not wait:
        return EventStream(generation, reply.stream(generation), reply.live(generation))
    if stream:
        try:
            await unless_disconnected(request, generation.begin())
        except BaseException as error:
            generation.__exit__(type(error), error, None)
            raise
        return EventStream(generation, reply.stream(generation), reply.live(generation))
    with generation:
        answer = await unless_disconnected(request, reply.whole(generation))
    return Response(await encode_reply(answer), media_type="application/json")
