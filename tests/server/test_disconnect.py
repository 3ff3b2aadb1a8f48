"""A client that goes away takes its request with it, at once and without noise."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from slipstream.server.errors import BodyTooLarge

from .api_fakes import MODEL, ScriptedEngine, config_with, make_app, reply_with
from .asgi_client import OpenRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def stalling(request: Any) -> list[Any]:
    return [*reply_with()(request)[:2], float("inf")]


def body_for(path: str, **more: Any) -> dict[str, Any]:
    text = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return {"model": MODEL, "max_tokens": 50, **text, **more}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts_every_child(
    path: str, n: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(stalling)
    request = OpenRequest(make_app(engine), path, body_for(path, n=n, stream=stream))
    if stream:
        assert (await request.next())["status"] == 200
        assert b"data: " in (await request.next())["body"]
    else:
        while len(engine.open) < n:
            await asyncio.sleep(0.005)
    assert len(engine.open) == n
    await request.hang_up()
    assert not engine.open and len(engine.aborted) == n
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    await no_tasks_left()


async def test_cancelling_the_server_task_aborts_too() -> None:
    engine = ScriptedEngine(stalling)
    request = OpenRequest(make_app(engine), TEXT, body_for(TEXT, stream=True))
    await request.next()
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.task
    assert not engine.open
    await no_tasks_left()


async def test_chunks_leave_as_they_come() -> None:
    engine = ScriptedEngine(stalling)
    request = OpenRequest(make_app(engine), TEXT, body_for(TEXT, stream=True))
    await request.next()
    first, second = (await request.next())["body"], (await request.next())["body"]
    assert b"Hell" in first and b"o w" in second and engine.open
    await request.hang_up()


async def test_outcomes_are_counted() -> None:
    engine = ScriptedEngine(stalling)
    app = make_app(engine)
    request = OpenRequest(app, TEXT, body_for(TEXT, stream=True))
    await request.next()
    await request.hang_up()
    text = app.state.services.metrics.text().decode()
    (line,) = [x for x in text.splitlines() if "request_success_total" in x and 'on="abort"' in x]
    assert line.endswith(" 1.0")


async def test_body_over_the_limit_is_refused_while_it_comes() -> None:
    app = make_app(ScriptedEngine(), config_with(max_body_bytes=100))
    request = OpenRequest(app, TEXT, body_for(TEXT, user="x" * 200))
    assert (await request.next())["status"] == BodyTooLarge.status == 413


async def no_tasks_left() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    current = asyncio.current_task()
    assert [t for t in asyncio.all_tasks() if t is not current] == []
