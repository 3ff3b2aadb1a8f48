"""The processes of one engine, with ends in any order: which of them is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from slipstream.configs.schema import Config
from slipstream.runner.messages import Fatal, StartRanks
from slipstream.runner.process import WorkerOrders
from slipstream.server.hosts.engine_processes import EngineProcesses
from slipstream.server.hosts.nodes import Exit, NodeProcess

LOST = Exit("node 1 (10.0.0.2) is gone", None, is_lost=True)
KILLED, FAILED, STOPPED = (
    Exit("was killed by SIGKILL", -9),
    Exit("ended with status 1", 1),
    Exit("ended with status 0", 0),
)


class FakeProcess:
    pid: int | None = None

    def __init__(self, log: list[str], name: str, obeys: bool) -> None:
        self._log, self._name, self._obeys = log, name, obeys
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        return await asyncio.shield(self.exit)

    def kill(self) -> None:
        self._log.append(f"kill {self._name}")
        if self._obeys and not self.exit.done():
            self.exit.set_result(KILLED)

    def release(self) -> None:
        self._log.append(f"release {self._name}")


class FakeNode:
    is_local = False

    def __init__(self, number: int, obeys: bool = True) -> None:
        self.number, self.address = number, f"10.0.0.{number + 1}"
        self.name = f"node {number} ({self.address})"
        self.log: list[str] = []
        self.started: list[tuple[str, WorkerOrders, int]] = []
        self.processes: list[FakeProcess] = []
        self._obeys = obeys

    def start(self, module: str, orders: WorkerOrders, slot: int) -> NodeProcess:
        self.started.append((module, orders, slot))
        process = FakeProcess(self.log, f"rank {orders.rank}", self._obeys)
        self.processes.append(process)
        return process


class Engine:
    """Rank 0 on node 0, ranks 1 and 2 on node 1."""

    def __init__(self) -> None:
        self.nodes = FakeNode(0), FakeNode(1)
        places = [(self.nodes[0], 0), (self.nodes[1], 0), (self.nodes[1], 1)]
        orders = WorkerOrders("tcp://10.0.0.1:7", 1, Config(), engine=None)
        self.processes = EngineProcesses(places, orders, "key", "engine 3 ")
        self.processes.start_ranks(
            StartRanks("tcp://10.0.0.1:8", "tcp://10.0.0.1:9", ["tcp://1", "tcp://2"])
        )

    def end(self, rank: int, how: Exit) -> None:
        processes = [*self.nodes[0].processes, *self.nodes[1].processes]
        processes[rank].exit.set_result(how)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    await engine.processes.kill()


async def test_ranks_are_started_where_they_belong(engine: Engine) -> None:
    ((module, worker, slot),) = engine.nodes[0].started
    assert (module, slot, worker.rank) == ("engine.worker", 0, 0)
    assert worker.hosted is not None and worker.hosted.address == "10.0.0.1"
    for rank, (module, orders, slot) in enumerate(engine.nodes[1].started, 1):
        assert (module, orders.rank, slot) == ("engine.rank", rank, rank - 1)
        assert orders.endpoint == f"tcp://{rank}" and orders.answers == "tcp://10.0.0.1:9"
        assert orders.rendezvous == "tcp://10.0.0.1:8"
        assert orders.hosted is not None and orders.hosted.address == "10.0.0.2"
        assert orders.log_name == f"engine 3 rank {rank}"


async def test_a_rank_that_was_killed_is_named_though_another_ended_first(engine: Engine) -> None:
    engine.end(0, FAILED)  # its collective failed
    asyncio.get_running_loop().call_later(0.1, engine.end, 2, KILLED)
    said = await asyncio.wait_for(engine.processes.ended(), 3)
    assert said == "tensor-parallel rank 2 on node 1 (10.0.0.2) was killed by SIGKILL"


async def test_a_node_that_is_gone_explains_what_the_worker_says(engine: Engine) -> None:
    asyncio.get_running_loop().call_later(0.1, engine.end, 1, LOST)
    fatal = await engine.processes.explained(Fatal("Connection closed by peer"))
    assert fatal.message == "node 1 (10.0.0.2) is gone"


async def test_what_the_worker_says_stands_if_nothing_explains_it(engine: Engine) -> None:
    engine.end(0, FAILED)
    fatal = await engine.processes.explained(Fatal("the model does not fit"))
    assert fatal.message == "the model does not fit"
    assert await engine.processes.ended() == "the worker on node 0 (10.0.0.1) ended with status 1"


async def test_a_worker_that_asks_for_other_ranks_ends_the_engine(engine: Engine) -> None:
    engine.processes.start_ranks(StartRanks("tcp://a:1", "tcp://a:2", ["tcp://3"] * 1000))
    assert "ranks that the engine does not have" in await engine.processes.ended()
    assert len(engine.nodes[1].started) == 2


async def test_stopping_waits_then_releases_then_kills(engine: Engine) -> None:
    engine.end(0, STOPPED)
    await engine.processes.stop(0.05)
    assert engine.nodes[1].log.index("release rank 1") < engine.nodes[1].log.index("kill rank 1")
    assert all(process.exit.done() for process in engine.nodes[1].processes)


async def test_processes_that_end_in_time_are_not_killed(engine: Engine) -> None:
    for rank in range(3):
        engine.end(rank, STOPPED)
    await engine.processes.stop(5.0)
    assert engine.nodes[1].processes[0].exit.result() == STOPPED


async def test_a_kill_that_is_cancelled_still_waits_for_the_ends(engine: Engine) -> None:
    for node in engine.nodes:
        node.processes[0]._obeys = False
    killing = asyncio.create_task(engine.processes.kill())
    await asyncio.sleep(0)
    killing.cancel()
    asyncio.get_running_loop().call_later(0.1, engine.end, 0, KILLED)
    asyncio.get_running_loop().call_later(0.2, engine.end, 1, KILLED)
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert engine.nodes[1].processes[0].exit.done()
    assert [f"release rank {rank}" in engine.nodes[bool(rank)].log for rank in (0, 1)] == [True] * 2
