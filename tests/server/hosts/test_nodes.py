"""Two nodes in one process, with real worker processes and engines without a model."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time
import types
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.schema import Config, HostsConfig, ModelConfig, ParallelConfig
from slipstream.server.engine.engine_client import EngineClient, WorkerFailed
from slipstream.server.engine.engines import Engines, create_engine
from slipstream.server.hosts import agent as agent_module
from slipstream.server.hosts.agent import Agent, agent_of
from slipstream.server.hosts.agreement import HostsError, membership, model_digest
from slipstream.server.hosts.executor import HostsExecutor
from slipstream.server.hosts.node_messages import Join
from slipstream.server.hosts.ray_cluster import RayCluster
from slipstream.server.request_stream import EngineDead

from ...end_to_end.running_server import free_port
from ..engine.test_engine_client import KILL, QUICK, is_gone, request, tokens, until
from ..engine.test_engine_client import fake_on_path as fake_on_path

SECRET = "a secret of the nodes"
FAKE = "fake_engine:build"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    hosts = HostsConfig(nnodes=2, group_key=SECRET, master_port=free_port(), join_timeout=10.0)
    model = ModelConfig(model=str(tmp_path), device="cpu")
    return Config(model=model, parallel=ParallelConfig(data_parallel_size=2), hosts=hosts)


def agent(config: Config, secret: str = SECRET, **claims: Any) -> Agent:
    """The agent of node 1, which may claim something else of itself."""
    me = replace_struct(membership(config, 1, config.hosts.nnodes), **claims)
    return agent_of(config, me, "127.0.0.1", config.hosts.master_port, secret)


def replace_struct(join: Join, **claims: Any) -> Join:
    import msgspec

    return msgspec.structs.replace(join, **claims)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class Group:
    """A server with an engine on each of two nodes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.left: list[str] = []
        self.executor = HostsExecutor(config, self.left.append)
        one = replace(config, parallel=ParallelConfig())
        self.clients = [
            EngineClient(one, engine=FAKE, backoff=QUICK, begin=self.executor.begin_of(index))
            for index in range(2)
        ]
        self.engines = Engines(self.clients)
        self.join()

    def join(self) -> None:
        self.agent = agent(self.config)
        self.node = asyncio.create_task(self.agent.run())

    @property
    def remote_pid(self) -> int:
        """The worker on node 1."""
        (process,) = self.agent._processes.values()
        return process.pid


@pytest.fixture
async def group(config: Config) -> AsyncIterator[Group]:
    group = Group(config)
    async with group.executor:
        await group.engines.start()
        yield group
        await group.engines.shutdown()
    await asyncio.wait_for(asyncio.gather(group.node, return_exceptions=True), 5)


async def test_each_node_runs_an_engine_and_the_second_ends_with_the_first(config: Config) -> None:
    group = Group(config)
    async with group.executor:
        await group.engines.start()
        streams = [group.engines.submit(request(f"r{n}", max_tokens=n + 1)) for n in range(6)]
        assert {stream.engine for stream in streams} == {0, 1}
        for n, got in enumerate(await asyncio.gather(*map(tokens, streams))):
            assert got == [100 + i for i in range(n + 1)]
        pids = [group.clients[0].worker_pid, group.remote_pid]
        assert group.clients[1].worker_pid is None  # as a rule, another host's number
        assert all(psutil.Process(pid).ppid() == os.getpid() for pid in pids)
        await group.engines.shutdown()
    await asyncio.wait_for(group.node, 5)  # without an error
    assert all(pid is not None and is_gone(pid) for pid in pids) and not group.left


async def test_a_worker_that_is_killed_on_another_node_is_named_and_started_again(
    group: Group,
) -> None:
    former = group.remote_pid
    stream = group.clients[1].submit(request("victim", first_token=KILL))
    with pytest.raises(EngineDead, match=r"the worker on node 1 \(127.0.0.1\) was killed by SIGK"):
        await tokens(stream)
    await until(lambda: group.clients[1].state == "ready")
    assert group.remote_pid != former
    assert await tokens(group.clients[1].submit(request("next"))) == [100, 101, 102, 103, 104]


async def test_a_node_that_is_lost_ends_its_requests_and_may_join_again(group: Group) -> None:
    streams = [client.submit(request("long", max_tokens=400)) for client in group.clients]
    await anext(aiter(streams[1]))
    pid = group.remote_pid
    began = time.monotonic()
    await cancelled(group.node)  # the agent ends without a word
    with pytest.raises(EngineDead, match=r"the engine stopped: node 1 \(127.0.0.1\) is gone"):
        await tokens(streams[1])
    assert time.monotonic() - began < 4 and is_gone(pid)
    assert len(await tokens(streams[0])) == 400  # the other engine goes on
    assert group.engines.state == "ready" and group.clients[1].state == "restarting"
    assert "node 1 (127.0.0.1) is gone" in group.clients[1].health.report.detail
    group.join()
    await until(lambda: group.clients[1].state == "ready", 20)
    assert len(await tokens(group.clients[1].submit(request("next")))) == 5


async def test_a_node_that_loses_the_first_one_ends_its_processes(group: Group) -> None:
    pid = group.remote_pid
    assert group.executor._hub is not None
    node = group.executor._hub._nodes[1]
    await node.close(False)  # as when the first node dies
    with pytest.raises(HostsError, match=r"node 0 at 127.0.0.1:\d+ is gone, so this node ends"):
        await asyncio.wait_for(group.node, 5)
    assert is_gone(pid)


async def test_a_node_that_is_asked_to_end_asks_the_server_to_stop(group: Group) -> None:
    group.agent.leave()
    await until(lambda: bool(group.left))
    assert group.left == ["node 1 (127.0.0.1)"] and not group.node.done()


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"version": "9.9"}, "node 1 has slipstream 9.9 and node 0 has .*: install the same"),
        ({"nnodes": 3}, "started with --nnodes 3 and node 0 with --nnodes 2: give all nodes"),
        ({"node": 2}, "node 2 cannot join: --node-rank must be 1 to 1"),
        ({"model": "another"}, "node 1 serves another and node 0 .*: name the same model"),
        ({"digest": "00"}, "the files of .* on node 1 are not those on node 0: copy the same"),
    ],
)
async def test_nodes_that_disagree_are_refused_in_one_sentence(
    claims: dict[str, Any], sentence: str, config: Config
) -> None:
    async with HostsExecutor(config, print) as executor:
        with pytest.raises(HostsError, match=sentence):
            await asyncio.wait_for(agent(config, **claims).run(), 5)
        assert executor._hub is not None and executor._hub.joined(1) is None


async def test_a_node_with_another_secret_is_told_so(config: Config) -> None:
    async with HostsExecutor(config, print) as executor:
        with pytest.raises(HostsError, match="set the same --group-key on all nodes"):
            await asyncio.wait_for(agent(config, "another secret here").run(), 10)
        assert executor._hub is not None and executor._hub.joined(1) is None


async def test_a_first_node_of_another_version_is_named(config: Config) -> None:
    async with HostsExecutor(config, print) as executor:
        joined = asyncio.create_task(agent(config).run())
        assert executor._hub is not None
        await executor._hub.nodes([1], 5)
        executor._hub._nodes[1]._pair.send_packet(b"\x81\xa4type\xa4News")
        with pytest.raises(HostsError, match="sends what this node does not understand"):
            await asyncio.wait_for(joined, 5)


async def test_messages_that_no_node_sends_are_refused_or_end_the_connection(
    config: Config,
) -> None:
    async with HostsExecutor(config, print) as executor:
        odd = agent(config)
        joined = asyncio.create_task(odd.run())
        hub = executor._hub
        assert hub is not None
        await hub.nodes([1], 5)
        assert odd._pair is not None
        odd._pair.send_packet(b"\x80\x04\x95")  # the beginning of a pickle
        with pytest.raises(HostsError, match="is gone"):
            await asyncio.wait_for(joined, 5)
        assert hub.joined(1) is None
        assert hub._reply(membership(config, 1, 2)) is not None  # and the hub goes on


async def test_the_same_node_joins_once(config: Config) -> None:
    async with HostsExecutor(config, print) as executor:
        first = asyncio.create_task(agent(config).run())
        assert executor._hub is not None
        await executor._hub.nodes([1], 5)
        late = replace(config, hosts=replace(config.hosts, join_timeout=3.0))
        with pytest.raises(HostsError, match="node 1 has joined already, from 127.0.0.1"):
            await agent(late).run()
        assert not first.done()
    await asyncio.wait_for(first, 5)


async def test_a_node_that_does_not_come_is_named(config: Config) -> None:
    soon = replace(config, hosts=replace(config.hosts, join_timeout=0.2))
    async with HostsExecutor(soon, print) as executor:
        client = create_engine(soon, FAKE, executor.begin_of)
        with pytest.raises(WorkerFailed, match=r"node 1 of 2 did not join within 0.2 s: check"):
            await client.start()
    with pytest.raises(HostsError, match=r"cannot join node 0 at 127.0.0.1:\d+ within 0.2 s"):
        await agent(soon).run()


async def test_addresses_and_ports_that_cannot_be_used_are_named(config: Config) -> None:
    def at(**hosts: Any) -> Config:
        return replace(config, hosts=replace(config.hosts, **hosts))

    with pytest.raises(WorkerFailed, match="cannot resolve --master-addr nowhere.invalid"):
        await HostsExecutor(at(master_addr="nowhere.invalid"), print).__aenter__()
    with pytest.raises(WorkerFailed, match="--master-addr must be an address of this host"):
        await HostsExecutor(at(master_addr="192.0.2.1"), print).__aenter__()
    async with HostsExecutor(config, print):
        with pytest.raises(WorkerFailed, match="and --master-port a free port"):
            await HostsExecutor(config, print).__aenter__()


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("999.1.1.1", socket.EAI_NONAME, "it is not an address"),
        ("999.1.1.1", socket.EAI_AGAIN, "it is not an address"),  # as without a resolver
        ("10.0.0.1:29501", socket.EAI_AGAIN, "it is not an address"),
        ("nowhere.invalid", socket.EAI_NONAME, "name or service not known"),
        ("two..dots", None, "it is not a valid host name"),
        ("resolver.is-down", socket.EAI_AGAIN, None),
    ],
)
async def test_a_node_refuses_at_once_an_address_that_nothing_resolves(
    name: str, code: int | None, why: str | None, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        tries.append(host)
        if code is None:
            return host.encode("idna")
        raise socket.gaierror(code, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(agent_module, "_RETRY_SECONDS", 0.01)
    seconds = 60 if why is not None else 0.05
    hosts = replace(config.hosts, master_addr=name, join_timeout=seconds)
    follower = agent(replace(config, hosts=hosts))
    follower._master = name
    expected = f"cannot resolve --master-addr {name}: {why}"
    if why is None:  # as while the first node's pod is started
        expected = f"cannot join node 0 at {name}:{hosts.master_port} within 0.05 s"
    with pytest.raises(HostsError, match=re.escape(expected)):
        await follower.run()
    assert (len(tries) == 1) == (why is not None)


async def test_ray_that_is_not_installed_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    hosts = HostsConfig(distributed_executor_backend="ray")
    with pytest.raises(WorkerFailed, match=r"needs Ray: pip install 'slipstream\[ray\]'"):
        await HostsExecutor(replace(config, hosts=hosts), print).__aenter__()


async def test_ray_does_not_keep_sigterm(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's core takes the signal and aborts the process three seconds after it."""

    class FakeRay:
        util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

        def init(self, **_: Any) -> None:
            ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # is ignored from now on

        def cluster_resources(self) -> dict[str, float]:
            return {"CPU": 2}

    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    try:
        assert await RayCluster(config, 3, SECRET).connect() == "127.0.0.1"
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asked.wait(), 5)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def test_a_models_digest_names_its_config_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    first = model_digest(str(tmp_path), None)
    assert first == model_digest(str(tmp_path), None) != ""
    weights.write_bytes(b"123")  # cut short
    assert model_digest(str(tmp_path), None) != first
    assert model_digest(str(weights), None) not in ("", first)
    assert model_digest("no such model", None) == ""
