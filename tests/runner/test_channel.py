"""The socket between the processes, both ends in one process."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.runner.channel import ServerChannel, WorkerChannel
from slipstream.runner.messages import AbortRequests, Fatal, Progress, Shutdown


@pytest.fixture
async def ends() -> Iterator[tuple[ServerChannel, WorkerChannel]]:  # type: ignore[misc]
    server = ServerChannel()
    worker = WorkerChannel(server.endpoint)
    yield server, worker
    worker.close()
    server.close()


async def test_lists_arrive_whole_in_order_both_ways(
    ends: tuple[ServerChannel, WorkerChannel],
) -> None:
    server, worker = ends
    worker.send([Progress("load", 1, 2), Progress("load", 2, 2)])
    worker.send([Fatal("sorry")])
    assert await server.receive() == [Progress("load", 1, 2), Progress("load", 2, 2)]
    assert await server.receive() == [Fatal("sorry")]
    server.send([AbortRequests(["a"])])
    server.send([AbortRequests(["b"]), Shutdown()])
    got = worker.receive(1.0)
    while len(got) < 3:
        got += worker.receive(1.0)
    assert got == [AbortRequests(["a"]), AbortRequests(["b"]), Shutdown()]


async def test_worker_polls_without_waiting(ends: tuple[ServerChannel, WorkerChannel]) -> None:
    assert ends[1].receive(0.0) == []


async def test_idle_worker_wakes_up_for_a_message(
    ends: tuple[ServerChannel, WorkerChannel],
) -> None:
    server, worker = ends
    worker.send([Progress("load", 1, 1)])
    await server.receive()  # the connection is there
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(worker.receive(None)))
    thread.start()
    await asyncio.sleep(0.05)
    assert thread.is_alive()
    server.send([Shutdown()])
    thread.join(2)
    assert got == [Shutdown()]


async def test_sending_to_nobody_neither_blocks_nor_raises() -> None:
    server = ServerChannel()
    server.send([Shutdown()])
    server.close()


async def test_end_of_the_worker_is_noticed() -> None:
    server = ServerChannel()
    worker = WorkerChannel(server.endpoint)
    worker.send([Fatal("last words")])
    worker.close()
    assert await server.receive() == [Fatal("last words")]
    await asyncio.wait_for(server.disconnected(), 2)
    server.close()


async def test_socket_is_private_and_removed() -> None:
    server = ServerChannel()
    folder = Path(server.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.close()
    assert not folder.exists()


async def test_long_temporary_folders_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = ServerChannel()
    assert len(server.endpoint.removeprefix("ipc://")) < 108
    server.close()
    assert os.listdir(deep) == []
