"""Runs a generation and sends the reply, whole or as a stream; the same for every endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from ..http.sse import EventStream, unless_disconnected
from ..off_loop import by_size
from ..text.choice_text import GenerationEvent
from .generation import Generation
from .large_replies import encode_reply
from .reply import Framer, Whole


async def respond(request: Request, generation: Generation, reply: Whole | Framer) -> Response:
    """Submit the generation and return the response.

    With a grammar, a streamed response starts only after its first event: the engine compiles the
    grammar, and a refusal must still be able to set the HTTP status.
    """
    generation.submit()
    if isinstance(reply, Framer):
        begun = []
        events = generation.events()
        if generation.job.sampling.grammar is not None:
            try:
                begun.append(await unless_disconnected(request, anext(events)))
            except BaseException as error:
                generation.__exit__(type(error), error, None)
                raise
        pieces = _pieces(events, begun, reply)
        live, silence = generation.live(reply.delta), generation.keep_alive
        return EventStream(generation, pieces, live, reply.failed, silence)
    with generation:
        answer = await unless_disconnected(request, _answer(generation, reply))
    return Response(await encode_reply(answer), media_type="application/json")


async def _answer(generation: Generation, reply: Whole) -> Any:
    async with aclosing(generation.events()) as events:
        async for item in events:
            reply.add(item)
    return await by_size(reply.size(), reply.answer)


async def _pieces(
    events: AsyncGenerator[GenerationEvent, None], begun: list[GenerationEvent], reply: Framer
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of the stream.

    The events in `begun` join the first piece, because `live` may continue after any piece.
    """
    async with aclosing(events):
        first = reply.first() + b"".join([reply.delta(item) for item in begun])
        if first:
            yield first
        async for item in events:
            if piece := await by_size(reply.size(item), reply.delta, item):
                yield piece
    yield reply.last()
