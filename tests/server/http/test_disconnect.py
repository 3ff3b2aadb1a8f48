"""A client that goes away takes its request with it, at once and without noise."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from slipstream.runner.messages import RequestOutput
from slipstream.server.errors import BodyTooLarge

from ..api_fakes import MODEL, ScriptedEngine, config_with, make_app, reply_with
from ..asgi_client import OpenRequest

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


GRAMMAR = {"structured_outputs": {"regex": "a+"}}


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, **GRAMMAR}, {}, GRAMMAR])
async def test_hanging_up_counts_as_an_abort_and_not_as_an_error(more: dict[str, Any]) -> None:
    """Also while the status line waits: for the whole reply, or for a grammar to be accepted."""
    engine = ScriptedEngine(lambda request: [float("inf")] if more else stalling(request))
    app = make_app(engine)
    request = OpenRequest(app, TEXT, body_for(TEXT, **more))
    while not engine.open:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    await request.hang_up()
    assert outcomes(app) == {"abort": 1.0}


async def test_what_the_engine_refuses_is_no_outcome_and_what_fails_is_an_error() -> None:
    end = RequestOutput("", [], finish_reason="error", error="no such grammar")
    engine = ScriptedEngine()

    def ends(invalid: bool) -> Any:
        return lambda r: [replace(end, request_id=r.request_id, invalid_request=invalid)]

    app = make_app(engine)
    for invalid, status, found in ((True, 400, {}), (False, 500, {"error": 1.0})):
        engine.script = ends(invalid)
        request = OpenRequest(app, TEXT, body_for(TEXT, **GRAMMAR))
        assert (await request.next())["status"] == status
        assert outcomes(app) == found


def outcomes(app: FastAPI) -> dict[str, float]:
    """The counts of request_success_total that are not zero."""
    text = app.state.services.metrics.text().decode()
    found = re.findall(r'request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', text)
    return {name: float(count) for name, count in found if float(count)}


async def test_body_over_the_limit_is_refused_while_it_comes() -> None:
    app = make_app(ScriptedEngine(), config_with(max_body_bytes=100))
    request = OpenRequest(app, TEXT, body_for(TEXT, user="x" * 200))
    assert (await request.next())["status"] == BodyTooLarge.status == 413


async def no_tasks_left() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    current = asyncio.current_task()
    assert [t for t in asyncio.all_tasks() if t is not current] == []
