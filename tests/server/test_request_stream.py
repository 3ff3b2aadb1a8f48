"""The stream alone: order, ends, errors."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.request_stream import EngineDead, RequestStream


async def test_ends_after_the_output_with_a_finish_reason() -> None:
    stream = RequestStream("r")
    stream.put(RequestOutput("r", [1]))
    stream.put(RequestOutput("r", [2, 3], finish_reason="stop"))
    assert [output.token_ids async for output in stream] == [[1], [2, 3]]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_waiting_reader_is_woken_by_output_and_by_close() -> None:
    stream = RequestStream("r")
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(RequestOutput("r", [1]))
    assert (await asyncio.wait_for(reader, 1)).token_ids == [1]
    last = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.close()
    assert await asyncio.wait_for(last, 1) is None


async def test_error_comes_after_what_arrived_before_it() -> None:
    stream = RequestStream("r")
    stream.put(RequestOutput("r", [1]))
    stream.fail(EngineDead("gone", retry_after=4))
    assert (await anext(stream)).token_ids == [1]
    with pytest.raises(EngineDead, match="gone") as caught:
        await anext(stream)
    assert caught.value.retry_after == 4
