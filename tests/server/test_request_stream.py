"""The stream alone: order, ends, errors."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.request_stream import EngineDead, RequestStream, Turn


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


async def test_drain_takes_what_is_there_without_waiting() -> None:
    stream = RequestStream("r")
    assert stream.drain() == []
    stream.put(RequestOutput("r", [1]))
    stream.put(RequestOutput("r", [2], finish_reason="stop"))
    assert [output.token_ids for output in stream.drain()] == [[1], [2]]
    assert await anext(stream, None) is None


async def followed(stream: RequestStream, seen: list[list[int]], more: bool = True) -> None:
    def take(outputs: list[RequestOutput]) -> bool:
        seen.append([token for output in outputs for token in output.token_ids])
        return more

    await stream.follow(take)


async def test_a_follower_gets_what_one_turn_brought_and_the_reader_the_end() -> None:
    stream = RequestStream("a")
    seen: list[list[int]] = []
    task = asyncio.create_task(followed(stream, seen))
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [1]))
    stream.put(RequestOutput("a", [2]))
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [3]))
    stream.put(RequestOutput("a", [4], finish_reason="length"))
    await task
    assert seen == [[1, 2], [3]]
    assert [output.token_ids async for output in stream] == [[4]]


async def test_a_follower_that_has_enough_leaves_the_rest_in_order() -> None:
    stream = RequestStream("a")
    seen: list[list[int]] = []
    task = asyncio.create_task(followed(stream, seen, more=False))
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [1]))
    await task
    for token in (2, 3):
        stream.put(RequestOutput("a", [token]))
    await asyncio.wait_for(followed(stream, seen), 1)  # outputs wait, so it does not begin
    stream.put(RequestOutput("a", [4], finish_reason="stop"))
    assert seen == [[1]]
    assert [output.token_ids async for output in stream] == [[2], [3], [4]]


async def test_a_follower_that_is_cancelled_or_faulty_loses_nothing_that_it_did_not_take() -> None:
    stream = RequestStream("a")
    seen: list[list[int]] = []
    task = asyncio.create_task(followed(stream, seen))
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [1]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stream.put(RequestOutput("a", [2], finish_reason="stop"))
    rest = [output.token_ids async for output in stream]
    assert [*seen, *rest] == [[1], [2]]

    def fault(outputs: list[RequestOutput]) -> bool:
        raise ValueError("no such text")

    other = RequestStream("b")
    faulty = asyncio.create_task(other.follow(fault))
    await asyncio.sleep(0)
    other.put(RequestOutput("b", [1]))
    with pytest.raises(ValueError, match="no such text"):
        await faulty


async def test_streams_of_one_turn_are_served_by_one_callback_and_none_spoils_another() -> None:
    turn = Turn()
    streams = [RequestStream(name, turn) for name in "abc"]
    seen: list[list[int]] = []

    def fault(outputs: list[RequestOutput]) -> bool:
        raise ValueError("no such text")

    tasks = [
        asyncio.create_task(followed(streams[0], seen)),
        asyncio.create_task(streams[1].follow(fault)),
        asyncio.create_task(followed(streams[2], seen)),
    ]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    scheduled: list[object] = []
    call_soon = loop.call_soon
    loop.call_soon = lambda *call, **more: scheduled.append(call) or call_soon(*call, **more)  # type: ignore[method-assign, func-returns-value]
    for step in range(2):  # of two packets that waited together
        for number, stream in enumerate(streams):
            stream.put(RequestOutput(stream.request_id, [10 * number + step]))
    assert len(scheduled) == 1
    loop.call_soon = call_soon  # type: ignore[method-assign]
    await asyncio.sleep(0)
    assert seen == [[0, 1], [20, 21]]
    streams[0].put(RequestOutput("a", [2], finish_reason="length"))
    streams[2].put(RequestOutput("c", [22], finish_reason="length"))
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1)
    assert [type(each) for each in found] == [type(None), ValueError, type(None)]


async def test_a_follower_ends_with_the_engine() -> None:
    stream = RequestStream("a")
    seen: list[list[int]] = []
    task = asyncio.create_task(followed(stream, seen))
    await asyncio.sleep(0)
    stream.put(RequestOutput("a", [1]))
    stream.fail(EngineDead("the worker died"))
    await asyncio.wait_for(task, 1)
    rest = []
    with pytest.raises(EngineDead):
        async for output in stream:
            rest.append(output.token_ids)
    assert [*seen, *rest] == [[1]]
