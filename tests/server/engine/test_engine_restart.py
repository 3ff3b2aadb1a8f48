"""Starting the worker again when the machine, and not the model, is in the way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.schema import Config
from slipstream.runner.channel import ServerChannel
from slipstream.runner.messages import FromWorker
from slipstream.server.engine.engine_client import Backoff, EngineClient, EngineDead, WorkerFailed

from .test_engine_client import QUICK, is_gone, request, tokens, until

TAKEN: list[int] = []  # descriptors that a test has used up
Cause = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture(autouse=True)
def fake_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def make_client() -> EngineClient:
    return EngineClient(Config(), engine="fake_engine:build", backoff=QUICK)


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    """Its channels have a temporary folder to themselves, with a short path."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        client = make_client()
        await client.start()
        yield client
        await client.shutdown()


def no_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))


def no_fork(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)


def no_descriptors(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Those of the dead worker's channel become free, and are fewer than the next one needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    with contextlib.suppress(OSError):
        while True:
            TAKEN.append(os.open(os.devnull, os.O_RDONLY))


def a_bug(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(channel: ServerChannel, _: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(ServerChannel, "_bind", fail)


def test_backoff_doubles_up_to_half_a_minute() -> None:
    assert [Backoff().delay(n) for n in (1, 2, 3, 4, 5, 6, 100)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (no_folder, "No such file or directory"),
        (no_fork, "Resource temporarily unavailable"),
        (no_descriptors, "Too many open files"),
        (a_bug, "nobody thought of this"),
    ],
)
async def test_a_restart_is_tried_until_the_cause_is_gone(
    client: EngineClient, cause: Cause, words: str, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    this = psutil.Process()
    held = this.num_fds(), this.num_threads()
    assert client.worker_pid is not None
    with pytest.MonkeyPatch.context() as patch:
        try:
            cause(patch, tmp_path)
            os.kill(client.worker_pid, signal.SIGKILL)
            await until(lambda: words in client.health.report.detail)
            assert client.state == "restarting"
            with pytest.raises(EngineDead, match=words):
                client.submit(request("early"))
            await asyncio.sleep(0.5)  # some failures more
            assert client.state == "restarting"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            while TAKEN:
                os.close(TAKEN.pop())
    await until(lambda: client.state == "ready")
    assert client.health.report.restarts == 1
    assert len(await tokens(client.submit(request("after")))) == 5
    assert (this.num_fds(), this.num_threads()) <= held, "failed starts left something behind"
    assert len(os.listdir(tempfile.gettempdir())) == 1, "and of folders, too"


async def test_a_first_start_without_processes_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = make_client()
    no_fork(monkeypatch, tmp_path)
    with pytest.raises(WorkerFailed, match="cannot be started .*temporarily unavailable"):
        await client.start()
    assert client.state == "failed"
    await client.shutdown()


async def test_a_worker_whose_messages_cannot_be_read_is_replaced(client: EngineClient) -> None:
    stream = client.submit(request("open", max_tokens=10**6))
    await anext(stream)
    pid = client.worker_pid

    def fail(message: FromWorker) -> None:
        raise ValueError("what is this")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client._watchdog, "feed", lambda: fail(None))  # type: ignore[arg-type]
        with pytest.raises(EngineDead, match="messages cannot be handled"):
            await tokens(stream)
    await until(lambda: client.state == "ready")
    assert pid is not None and is_gone(pid)
    assert len(await tokens(client.submit(request("after")))) == 5


async def test_the_end_of_the_supervisor_shows(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reason: str, failures: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(client, "_announce", fail)
    stream = client.submit(request("open", max_tokens=10**6))
    await anext(stream)
    assert client.worker_pid is not None
    os.kill(client.worker_pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="no longer supervised"):
        await tokens(stream)
    assert client.state == "failed"
    assert "restart the server" in client.health.report.detail
