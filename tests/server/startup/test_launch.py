"""The server process: port, start, signals, exit status; with a fake engine and a fake app."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from slipstream.configs.schema import Config, ModelConfig, ServerConfig
from slipstream.runner.messages import AddRequest, SamplingParams, SetVocabulary
from slipstream.server.engine.engine_client import EngineClient, EngineDead
from slipstream.server.startup import launch
from slipstream.server.startup.launch import Launch, LaunchError, bind, serve
from slipstream.server.text.tokenizer_convert import ORPHANED
from slipstream.server.text.tokenizer_source import TokenizerLoadError

from ...cases import some

HANG = 60_003  # as in fake_engine
SETTLED_HEAP = launch._settled_heap


def tiny_app(config: Config, client: EngineClient) -> tuple[Any, SetVocabulary]:
    """GET /N streams N numbers from the engine, then `end` or the error."""

    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            raise RuntimeError("no lifespan")
        count = int(scope["path"].strip("/"))
        sampling = SamplingParams(seed=0, max_tokens=count)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            first = HANG if count == HANG else 1
            async for output in client.submit(AddRequest(f"r{count}", [first], sampling)):
                text = f"{output.token_ids[0]}\n".encode()
                await send({"type": "http.response.body", "body": text, "more_body": True})
            last = b"end"
        except EngineDead as error:
            last = str(error).encode()
        await send({"type": "http.response.body", "body": last})

    return app, SetVocabulary([b"a"], [])


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")
    monkeypatch.setattr(launch, "_create_app", tiny_app)
    monkeypatch.setattr(launch, "_check_model", lambda config: None)
    # It would make the tests' own process collect torch's modules for as long as a start takes.
    monkeypatch.setattr(launch, "_settled_heap", contextlib.nullcontext)
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before, "a process is left"


def make_config(port: int = 0, drain_timeout: float = 10.0, **tricks: Any) -> Config:
    return Config(
        server=ServerConfig(port=port, drain_timeout=drain_timeout, served_model_name=("fake",)),
        model=ModelConfig(hf_overrides=json.dumps(tricks)),
    )


class Run:
    """A Launch on this loop, its URL and its exit status."""

    def __init__(self, config: Config) -> None:
        self.listener = bind(config.server)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.task = asyncio.create_task(Launch(config, self.listener).run())

    async def ready(self) -> Run:
        async with httpx.AsyncClient(verify=False) as http:
            for _ in range(500):
                try:
                    assert (await http.get(f"{self.url}/1")).text == "100\nend"
                    return self
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        raise AssertionError("did not start")

    async def end(self, seconds: float = 8.0) -> int:
        status = await asyncio.wait_for(self.task, seconds)
        self.listener.close()
        return status


async def fetch(url: str) -> str:
    async with httpx.AsyncClient(timeout=20, verify=False) as http:  # no slow TLS set-up
        return (await http.get(url)).text


async def test_serves_says_where_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    run = await Run(make_config()).ready()
    said = capsys.readouterr().out
    for _ in range(200):  # the port answers a moment before the line is printed
        if "Serving" in said:
            break
        await asyncio.sleep(0.02)
        said += capsys.readouterr().out
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.end() == 0
    assert f"Serving fake at {run.url} (cpu, float32, speculation: off)" in said
    assert f"Its live page is {run.url}/live\n" in said


async def test_no_collection_walks_what_the_start_made_while_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_settled_heap", SETTLED_HEAP)
    gc.unfreeze()  # as in a process that starts
    before = gc.get_threshold(), gc.get_freeze_count()
    run = await Run(make_config()).ready()
    assert gc.get_freeze_count() > len(sys.modules)
    assert len(gc.get_objects()) < gc.get_freeze_count() / 4
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.end() == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    gc.freeze()  # again, as `freeze_imports` in tests/conftest.py has done


# The shared servers of tests/conftest.py end their sessions by the other two, with a stream open.
@pytest.mark.parametrize(
    "sig", some([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [signal.SIGHUP])
)
async def test_signal_lets_open_requests_finish(sig: signal.Signals) -> None:
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # the tests may run under nohup, whose wish is kept
    run = await Run(make_config(step_seconds=0.01)).ready()
    open_request = asyncio.create_task(fetch(f"{run.url}/200"))
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), sig)
    await asyncio.sleep(0.05)
    assert "shutting down" in await fetch(f"{run.url}/7")  # refused, but told why
    assert len((await open_request).splitlines()) == 201
    assert await run.end() == 0


async def test_requests_that_outlast_the_drain_are_told() -> None:
    run = await Run(make_config(drain_timeout=0.2)).ready()
    open_request = asyncio.create_task(fetch(f"{run.url}/1000000"))
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await open_request).splitlines()[-1] == "the server is shutting down"
    assert await run.end() == 0


async def test_second_ctrl_c_ends_at_once() -> None:
    run = await Run(make_config(drain_timeout=60)).ready()
    open_request = asyncio.create_task(fetch(f"{run.url}/{HANG}"))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.2)
    assert not run.task.done()
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    assert await run.end() == 130
    assert time.monotonic() - began < 2
    await asyncio.gather(open_request, return_exceptions=True)


async def test_second_ctrl_c_does_not_wait_for_the_step_in_flight_either() -> None:
    run = await Run(make_config(drain_timeout=0)).ready()
    open_request = asyncio.create_task(fetch(f"{run.url}/{HANG}"))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.3)  # the drain is over, and the worker has seconds for its step
    assert not run.task.done()
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    assert await run.end() == 130
    assert time.monotonic() - began < 2
    await asyncio.gather(open_request, return_exceptions=True)


def test_second_ctrl_c_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    streaming = threading.Event()

    def make(config: Config, client: EngineClient) -> tuple[FastAPI, SetVocabulary]:
        app = FastAPI()

        @app.get("/")
        async def endless() -> StreamingResponse:
            request = AddRequest("r", [1], SamplingParams(seed=0, max_tokens=10**6))

            async def texts() -> AsyncIterator[str]:
                with contextlib.suppress(EngineDead):
                    async for _ in client.submit(request):
                        streaming.set()
                        yield "x"

            return StreamingResponse(texts())

        return app, SetVocabulary([b"a"], [])

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def interrupt_twice() -> None:
        try:
            for _ in range(500):
                with contextlib.suppress(httpx.ConnectError):
                    with httpx.stream("GET", f"http://127.0.0.1:{port}/") as reply:
                        pieces = reply.iter_bytes()
                        assert next(pieces)
                        os.kill(os.getpid(), signal.SIGINT)
                        time.sleep(0.3)
                        os.kill(os.getpid(), signal.SIGINT)
                        with contextlib.suppress(httpx.TransportError):
                            list(pieces)
                    return
                time.sleep(0.02)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)  # let the server end
            raise

    monkeypatch.setattr(launch, "_create_app", make)
    user = threading.Thread(target=interrupt_twice)
    user.start()
    status = serve(make_config(port, drain_timeout=60))
    user.join(10)
    assert status == 130 and streaming.is_set() and not user.is_alive()
    shown = capfd.readouterr().err
    assert "finishing 1 open requests" in shown
    assert "Traceback" not in shown and "ERROR" not in shown


async def test_signal_during_the_start_ends_it() -> None:
    run = Run(make_config(start_seconds=60))
    await asyncio.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.end() == 0


async def test_signal_while_the_text_side_is_set_up_does_not_wait_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_create_app", lambda config, client: time.sleep(20))
    run = Run(make_config())
    await asyncio.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    began = time.monotonic()
    assert await run.end() == 0
    assert time.monotonic() - began < 5


def test_failing_worker_is_reported_while_the_text_side_is_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_create_app", lambda config, client: time.sleep(20))
    began = time.monotonic()
    assert serve(make_config(fail="the model is too large")) == 1
    assert time.monotonic() - began < 10
    assert "error: the model is too large" in capsys.readouterr().err


def test_converter_ends_with_the_server(tmp_path: Path) -> None:
    end, held = os.pipe()
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slipstream.server.text.tokenizer_convert",
            str(tmp_path),
            "nowhere",
        ],
        stdin=end,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[3])},
    )
    os.close(end)
    os.close(held)  # as if this process had died
    assert child.wait(10) == ORPHANED


def test_busy_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(make_config(port)) == 1
    shown = capsys.readouterr().err
    assert shown == (
        f"slipstream serve: error: cannot listen on port {port} of 127.0.0.1 "
        "(address already in use): choose another with --port\n"
    )


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no.such.host.invalid", "cannot resolve --host no.such.host.invalid: "),
        ("a..b", "cannot resolve --host a..b: "),
        ("x" * 70, "cannot resolve --host x+: "),
        (
            "192.0.2.1",
            "cannot bind to 192.0.2.1: it is not an address of this machine",
        ),  # of documents only
    ],
)
def test_a_host_that_is_not_here_is_one_sentence(host: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        bind(ServerConfig(host=host))
    assert "--port" not in str(caught.value) and "\n" not in str(caught.value)


def test_failing_worker_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(make_config(fail="the model is too large\nTraceback")) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "slipstream serve: error: the model is too large"
    assert not any("Traceback" in line for line in shown)
    assert [line.split(" in ")[0] for line in shown if "done" in line] == ["loading weights: done"]
    assert shown[-2].startswith("allocating KV blocks: stopped after")


def test_failing_app_is_one_sentence_and_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")

    def broken(*arguments: object) -> None:
        raise TokenizerLoadError("There is no tokenizer.")

    monkeypatch.setattr("slipstream.server.startup.app.create_app", broken)
    assert serve(make_config(start_seconds=60)) == 1
    assert "error: There is no tokenizer\n" in capsys.readouterr().err
