"""Workers of engines that share experts: they start together, and the first death is the reason."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from slipstream.server.engine import worker_group
from slipstream.server.engine.worker_group import GroupEnded, WorkerGroup


async def test_workers_wait_for_each_other_and_end_together() -> None:
    group = WorkerGroup(2)
    first = asyncio.create_task(group.join(0))
    await asyncio.sleep(0)
    assert not first.done()
    second = await group.join(1)
    place = await first
    assert (place.engine, place.size, second.engine) == (0, 2, 1)
    assert place.folder == second.folder and Path(place.folder).is_dir()
    told = asyncio.create_task(group.ended(0))
    await asyncio.sleep(0)
    assert not told.done()
    sentence = "data-parallel rank 1 was killed by SIGKILL"
    assert group.end(1, "the worker was killed by SIGKILL") == sentence
    assert await told == sentence
    # What the others report later is a consequence.
    assert group.end(0, "RuntimeError: connection closed") == sentence
    again = await asyncio.gather(group.join(1), group.join(0))
    assert again[0].folder == again[1].folder != place.folder
    assert not Path(place.folder).exists()
    assert group.end(0, "CUDA is lost") == "data-parallel rank 0 ended: CUDA is lost"
    group.close()
    assert not Path(again[0].folder).exists()


async def test_a_fault_at_the_start_names_no_engine_and_a_cancelled_start_leaves_the_line() -> None:
    group = WorkerGroup(2)
    lost = asyncio.create_task(group.join(0))
    await asyncio.sleep(0)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    other = asyncio.create_task(group.join(1))
    await asyncio.sleep(0)
    assert not other.done()  # engine 0 has to come again
    await group.join(0)
    await other
    assert group.end(1, "there is no model x", at_start=True) == "there is no model x"
    group.close()


async def test_a_full_disk_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(worker_group.tempfile, "mkdtemp", refuse)
    group = WorkerGroup(2)
    places = await asyncio.gather(group.join(0), group.join(1), return_exceptions=True)
    assert [type(place) for place in places] == [OSError, OSError]


async def test_on_several_hosts_the_first_engine_says_where_all_meet() -> None:
    group = WorkerGroup(3, on_hosts=True)
    others = [asyncio.create_task(group.join(engine)) for engine in (1, 2)]
    first = await group.join(0)
    assert (first.folder, first.rendezvous) == ("", "")
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    group.met("tcp://10.0.0.1:7")
    places = await asyncio.gather(*others)
    assert [(place.engine, place.rendezvous) for place in places] == [
        (1, "tcp://10.0.0.1:7"),
        (2, "tcp://10.0.0.1:7"),
    ]
    # Of the next group it is another place, which may never become known.
    for engine in range(3):
        group.end(engine, "node 1 is gone")
    others = [asyncio.create_task(group.join(engine)) for engine in (1, 2)]
    assert (await group.join(0)).rendezvous == ""
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    group.end(0, "there is no model x", at_start=True)
    for other in others:
        with pytest.raises(GroupEnded, match="^there is no model x$"):
            await other
    group.close()
