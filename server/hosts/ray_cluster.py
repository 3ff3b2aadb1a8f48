"""Places the processes by Ray: one placement group an engine, one actor for each accelerator.

Each actor runs the agent of a node with one device, which then joins like any other. Ray decides
where, and shows the logs of all of them at the server, with the name of the rank.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Any

from ...configs.schema import Config
from ..engine.engine_client import WorkerFailed
from ..off_loop import in_daemon_thread
from .agent import agent_of
from .agreement import HostsError, membership

log = logging.getLogger("slipstream.hosts")

_LEAVE_SECONDS = 5.0  # for actors to end after their nodes were told that the server stops


class RankActor:
    """The Ray actor of one rank: it runs the agent that joins the server."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:  # Ray begins each line of this actor's log with it
        return self._name

    def run(self, config: Config, node: int, nnodes: int, master: str, port: int, key: str) -> str:
        """Run the agent until the server ends. Returns "", or a sentence that says what failed."""
        from ...configs.logs import configure_logging

        configure_logging(config.server.log_level, config.server.log_format, self._name)
        try:
            me = membership(config, node, nnodes)
            asyncio.run(agent_of(config, me, master, port, key).run())
        except (HostsError, OSError) as error:
            return str(error)
        return ""


class RayCluster:
    """The part of a Ray cluster that this server uses."""

    def __init__(self, config: Config, num_nodes: int, secret: str) -> None:
        """Raises WorkerFailed if Ray is not installed."""
        # Ray reads these when it is imported. Lines that several ranks log are shown for each.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        if not sys.stderr.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        try:
            import ray
        except ImportError:
            raise WorkerFailed(
                "--distributed-executor-backend ray needs Ray: pip install 'slipstream[ray]'"
            ) from None
        self._ray: Any = ray
        self._config, self._num_nodes, self._secret = config, num_nodes, secret
        self._address = ""
        self._groups: dict[int, Any] = {}  # first node of an engine -> placement group
        self._actors: dict[int, list[Any]] = {}  # likewise, its actors
        self._runs: dict[int, list[Any]] = {}  # likewise, their unfinished calls

    async def connect(self) -> str:
        """Connect to the cluster; returns this host's address. Raises WorkerFailed."""
        # Ray replaces the handler of SIGTERM, which it cannot do outside the main thread.
        self._address = await in_daemon_thread(self._connect)
        _take_back_sigterm()
        return self._address

    def _connect(self) -> str:
        ray = self._ray
        try:
            ray.init(address="auto", log_to_driver=True, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            log.debug("no Ray cluster", exc_info=True)
            raise WorkerFailed(
                "there is no Ray cluster to connect to: start one with `ray start --head`, or "
                f"name its address in RAY_ADDRESS ({str(error).partition(chr(10))[0]})"
            ) from error
        size = self._config.parallel
        wanted = size.tensor_parallel_size * size.data_parallel_size
        kind = self._kind()
        shown = int(ray.cluster_resources().get(kind, 0))
        if shown < wanted:
            raise WorkerFailed(
                f"the Ray cluster has {shown} {kind}s, but --tensor-parallel-size times "
                f"--data-parallel-size needs {wanted}"
            )
        return str(ray.util.get_node_ip_address())

    def _kind(self) -> str:
        """The Ray resource that each process reserves one of: "GPU" or "CPU"."""
        device = self._config.model.device
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        return "GPU" if device == "cuda" or (device == "auto" and has_gpus) else "CPU"

    async def place(self, numbers: list[int], has_joined: Callable[[int], bool], port: int) -> None:
        """Start the actors of one engine, unless all its nodes have joined the server already.

        `numbers` are its nodes, one for each rank; `port` is the hub's. Raises WorkerFailed if Ray
        cannot reserve the resources in time.
        """
        if not all(has_joined(number) for number in numbers):
            await in_daemon_thread(self._place, numbers, port)

    def _place(self, numbers: list[int], port: int) -> None:
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, kind, first = self._ray, self._kind(), numbers[0]
        self._remove(first)
        group = placement_group([{kind: 1} for _ in numbers], strategy="PACK")
        self._groups[first] = group
        if not group.wait(self._config.hosts.join_timeout):
            raise WorkerFailed(
                f"Ray could not reserve {len(numbers)} {kind}s within "
                f"{self._config.hosts.join_timeout:g} s: `ray status` shows what uses them"
            )
        hosts = placement_group_table(group)["bundles_to_node_id"]
        # Neighbouring ranks share a host, which the faster links are for.
        bundles = sorted(range(len(numbers)), key=lambda bundle: (hosts[bundle], bundle))
        actor_type = ray.remote(RankActor)
        actors, runs = [], []
        for rank, (number, bundle) in enumerate(zip(numbers, bundles, strict=True)):
            actor = actor_type.options(
                num_gpus=1 if kind == "GPU" else 0,
                num_cpus=1 if kind == "CPU" else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote(self._name(first, rank))
            master = (self._address, port, self._secret)
            actors.append(actor)
            runs.append(actor.run.remote(self._config, number, self._num_nodes, *master))
        self._actors[first], self._runs[first] = actors, runs

    def _name(self, first: int, rank: int) -> str:
        parallel = self._config.parallel
        engine = (first - 1) // parallel.tensor_parallel_size
        return f"engine {engine} rank {rank}" if parallel.data_parallel_size > 1 else f"rank {rank}"

    def _remove(self, first: int) -> None:
        """End the actors of an engine and give back what they reserved."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors.pop(first, []):
            self._ray.kill(actor)
        self._runs.pop(first, None)
        if (group := self._groups.pop(first, None)) is not None:
            remove_placement_group(group)

    async def close(self) -> None:
        """Wait a while for the actors to end by themselves, kill the others, leave the cluster."""
        await in_daemon_thread(self._close)

    def _close(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            return
        runs = [run for engine in self._runs.values() for run in engine]
        if runs:
            ray.wait(runs, num_returns=len(runs), timeout=_LEAVE_SECONDS)
        for first in list(self._groups):
            self._remove(first)
        ray.shutdown()


def _take_back_sigterm() -> None:
    """Restore Python's handler of SIGTERM, which Ray has replaced by one for a process that dies.

    Ray's core calls the former handler, but also sets an alarm that aborts the process three
    seconds later, in the middle of its drain. Call it in the main thread.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and current_thread() is main_thread():
        signal.signal(signal.SIGTERM, handler)
