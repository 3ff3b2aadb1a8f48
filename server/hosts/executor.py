"""Starts the engines' processes on several hosts: on nodes that join, or that Ray places."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

from ...configs.hosts import num_processes
from ...configs.schema import Config, HostsConfig
from ...runner.channel import ServerChannel
from ...runner.group_key import derive_key, resolve
from ...runner.pair import Listening
from ...runner.process import EngineOrders, WorkerOrders
from ..engine.engine_client import BeginWorker, WorkerFailed
from ..engine.engines import visible_devices
from ..engine.worker_watch import Worker
from .agreement import membership
from .engine_processes import EngineProcesses
from .hub import Hub, NotJoined
from .nodes import LocalNode, Node
from .ray_cluster import RayCluster


class HostsExecutor:
    """The nodes and what runs on them. Use it as a context, on the event loop."""

    def __init__(self, config: Config, on_leave: Callable[[str], None]) -> None:
        """`on_leave` is called with the name of a node that was asked to end.

        Raises WorkerFailed if the group's key cannot be used.
        """
        self._config, self._hosts, self._on_leave = config, config.hosts, on_leave
        self._is_ray = self._hosts.distributed_executor_backend == "ray"
        total = num_processes(config)
        self._slots = 1 if self._is_ray else total // self._hosts.nnodes  # of each node
        # With Ray, node 0 is the server and runs nothing.
        self._num_nodes = total + 1 if self._is_ray else self._hosts.nnodes
        secret = secrets.token_hex(32) if self._is_ray else self._hosts.group_key
        assert secret is not None, "the configuration was checked"
        try:
            self._key = derive_key(secret)
        except OSError as error:
            raise WorkerFailed(str(error)) from error
        self._secret = secret
        self._hub: Hub | None = None
        self._placer: RayCluster | None = None

    async def __aenter__(self) -> HostsExecutor:
        """Listen for nodes. Raises WorkerFailed."""
        if self._is_ray:
            self._placer = RayCluster(self._config, self._num_nodes, self._secret)
        try:
            self._hub = await self._open_hub()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open_hub(self) -> Hub:
        hosts = self._hosts
        if self._placer is not None:
            self._address, port = await self._placer.connect(), 0
        else:
            self._address, port = _own(hosts), hosts.master_port
        devices = [] if self._config.model.device == "cpu" else visible_devices()
        local = None if self._is_ray else LocalNode(self._address, devices)
        if local is not None and devices and len(devices) < self._slots:
            raise WorkerFailed(
                f"node 0 shows {len(devices)} GPUs, but each of {hosts.nnodes} nodes needs "
                f"{self._slots} for --tensor-parallel-size times --data-parallel-size"
            )
        own = await asyncio.to_thread(membership, self._config, 0, self._num_nodes)
        listening = Listening(self._address, self._key)
        try:
            return Hub(own, listening, port, self._slots, local, self._on_leave)
        except OSError as error:
            raise WorkerFailed(
                f"cannot listen on port {port} of {self._address} for the other nodes "
                f"({(error.strerror or str(error)).lower()}): --master-addr must be an address of "
                "this host, and --master-port a free port"
            ) from error

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._hub is not None:
            await self._hub.close()
        if self._placer is not None:
            await self._placer.close()

    def begin_of(self, index: int) -> BeginWorker:
        """The function that starts the processes of an engine."""

        async def begin(config: Config, engine: str | None, place: EngineOrders | None) -> Worker:
            return await self._begin(index, config, engine, place)

        return begin

    async def _begin(
        self, index: int, config: Config, engine: str | None, place: EngineOrders | None
    ) -> Worker:
        assert self._hub is not None
        size = config.parallel.tensor_parallel_size
        wanted = [self._place(index * size + rank) for rank in range(size)]
        nodes = await self._nodes(self._hub, [number for number, _ in wanted])
        places = [(nodes[number], slot) for number, slot in wanted]
        is_here = places[0][0].is_local
        channel = ServerChannel(None if is_here else Listening(self._address, self._key))
        try:
            own = _without_secrets(config)
            orders = WorkerOrders(channel.endpoint, os.getpid(), own, engine=engine, engines=place)
            several = self._config.parallel.data_parallel_size > 1
            name = f"engine {index} " if several else ""
            return Worker(EngineProcesses(places, orders, self._key, name), channel)
        except BaseException:
            channel.close()
            raise

    def _place(self, position: int) -> tuple[int, int]:
        """The node and its slot of a process, by its position among those of all engines."""
        number, slot = divmod(position, self._slots)
        return number + self._is_ray, slot

    async def _nodes(self, hub: Hub, numbers: list[int]) -> dict[int, Node]:
        if self._placer is not None:
            await self._placer.place(numbers, lambda n: hub.joined(n) is not None, hub.port)
        try:
            return await hub.nodes(set(numbers), self._hosts.join_timeout)
        except NotJoined as error:
            raise WorkerFailed(str(error)) from error


def _own(hosts: HostsConfig) -> str:
    try:
        return resolve(hosts.master_addr, hosts.master_port)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise WorkerFailed(f"cannot resolve --master-addr {hosts.master_addr}: {why}") from error


def _without_secrets(config: Config) -> Config:
    """What processes on other hosts need to know."""
    server = replace(config.server, api_key=(), admin_api_key=())
    return replace(config, server=server, hosts=HostsConfig())
