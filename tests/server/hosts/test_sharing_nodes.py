"""Engines that share experts on two nodes of this machine: texts of one engine, and a lost node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.checks import check
from slipstream.configs.schema import Config, HostsConfig
from slipstream.server.engine.engine_client import EngineDead, WorkerFailed
from slipstream.server.engine.engines import Engines, create_engine
from slipstream.server.hosts.agent import Agent
from slipstream.server.hosts.executor import HostsExecutor

from ...end_to_end.running_server import free_port
from ..engine.test_engine_client import is_gone, until
from ..engine.test_sharing_engines import configured, submit, texts, tokens
from ..engine.test_sharing_engines import expected as expected
from ..engine.test_sharing_engines import model as model
from .test_nodes import SECRET, agent, cancelled


def on_two_nodes(model: Path, ranks: int = 1) -> Config:
    hosts = HostsConfig(nnodes=2, group_key=SECRET, master_port=free_port(), join_timeout=20.0)
    return check(replace(configured(model, ranks), hosts=hosts))


class Nodes:
    """The server and the agent of node 1, in this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.join()

    def join(self) -> None:
        self.agent: Agent = agent(self.config)
        self.node = asyncio.create_task(self.agent.run())

    @property
    def remote(self) -> list[int]:
        """The processes on node 1."""
        return [process.pid for process in self.agent._processes.values()]


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[tuple[Engines, Nodes]]:
    nodes = Nodes(config)
    async with HostsExecutor(config, print) as executor:
        engines = create_engine(config, begin_of=executor.begin_of)
        assert isinstance(engines, Engines)
        await engines.start()
        try:
            yield engines, nodes
        finally:
            await engines.shutdown(grace=2.0)
    await asyncio.wait_for(asyncio.gather(nodes.node, return_exceptions=True), 5)


def folders() -> set[str]:
    import tempfile

    return {path.name for path in Path(tempfile.gettempdir()).glob("slipstream-engines-*")}


@pytest.mark.usefixtures("forked_workers")
async def test_engines_on_two_nodes_write_the_texts_of_one_and_end_together(
    model: Path, expected: list[list[int]]
) -> None:
    before = folders()
    async with served(on_two_nodes(model)) as (engines, nodes):
        assert await texts(engines) == expected
        assert await tokens(submit(engines, 0)) == expected[0]  # called by a message over TCP
        assert folders() == before
        own, (remote,) = engines.clients[0].worker_pid, nodes.remote
        assert own is not None and engines.clients[1].worker_pid is None
        ports = [c for c in psutil.Process(remote).net_connections("tcp") if c.status == "LISTEN"]
        assert ports and {port.laddr.ip for port in ports} == {"127.0.0.1"}
        streams = [submit(engines, index, 110) for index in range(2)]
        assert {stream.engine for stream in streams} == {0, 1}
        for stream in streams:
            await anext(aiter(stream))
        psutil.Process(remote).kill()
        sentence = r"data-parallel rank 1 on node 1 \(127.0.0.1\) was killed by SIGKILL"
        for stream in streams:
            with pytest.raises(EngineDead, match=sentence):
                await tokens(stream)
        await until(lambda: is_gone(own), 10)


async def all_ready(engines: Engines, before: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while engines.clients[0].worker_pid in (before, None) or any(
        client.state != "ready" for client in engines.clients
    ):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_lost_node_ends_all_engines_which_start_anew_when_it_is_back(
    ranks: int, model: Path, expected: list[list[int]]
) -> None:
    async with served(on_two_nodes(model, ranks)) as (engines, nodes):
        assert await texts(engines) == expected
        assert len(nodes.remote) == ranks  # an engine on each node
        before = engines.clients[0].worker_pid
        streams = [submit(engines, index, 110) for index in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        await cancelled(nodes.node)  # the agent ends without a word
        for stream in streams:
            with pytest.raises(EngineDead, match=r"node 1 \(127.0.0.1\) is gone"):
                await tokens(stream)
        nodes.join()
        await all_ready(engines, before)
        assert await texts(engines) == expected


@pytest.mark.slow
async def test_a_node_that_does_not_come_ends_the_start_of_all_engines(model: Path) -> None:
    config = on_two_nodes(model)
    soon = replace(config, hosts=replace(config.hosts, join_timeout=0.5))
    async with HostsExecutor(soon, print) as executor:
        engines = create_engine(soon, begin_of=executor.begin_of)
        with pytest.raises(WorkerFailed, match=r"node 1 of 2 did not join within 0.5 s: check"):
            await engines.start()
        assert isinstance(engines, Engines) and not [pid for pid in pids_of(engines) if pid]


def pids_of(engines: Engines) -> list[int | None]:
    return [client.worker_pid for client in engines.clients]
