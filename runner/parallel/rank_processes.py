"""Who starts the processes of the other ranks (this one, or the servers); where ranks meet."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...configs.schema import Config
from ..messages import EnginesMeet, StartRanks
from ..process import EngineOrders, Hosted, WorkerOrders, start_process


@dataclass(frozen=True)
class Host:
    """The host of a rank whose group is on several hosts."""

    address: str  # numeric
    listener: socket.socket | None = None  # of the first rank, on the rendezvous's port


class RankProcesses(Protocol):
    """The processes of the ranks 1, 2 ... as the first rank sees them."""

    def start(self, meeting: StartRanks) -> None:
        """Start the processes, or have them started. Raises OSError."""

    def ended(self) -> Iterator[tuple[int, int]]:
        """The ranks that have ended and their statuses, as far as this process can see them."""

    def wait(self, seconds: float) -> None:
        """Give the processes that long to exit."""

    def kill(self) -> None:
        """Kill the processes that still run, and free what they held."""


class LocalRanks:
    """Child processes of this one, on the same host."""

    def __init__(self, config: Config, engines: EngineOrders | None = None) -> None:
        """`engines`: the place of their engine among those that share the experts."""
        self._config, self._engines = config, engines
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, meeting: StartRanks) -> None:
        size = self._config.parallel.tensor_parallel_size
        for rank, endpoint in enumerate(meeting.commands, 1):
            orders = WorkerOrders(
                endpoint,
                os.getpid(),
                self._config,
                name=f"slip-rank-{rank}",
                rank=rank,
                rendezvous=meeting.rendezvous,
                answers=meeting.answers,
                engines=self._engines,
            )
            devices = {"CUDA_VISIBLE_DEVICES": devices_from(rank, size)}
            self._processes.append(start_process("engine.rank", orders, devices))

    def ended(self) -> Iterator[tuple[int, int]]:
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                yield rank, status

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class HostedRanks:
    """Processes that the server starts, watches and ends, on its host or others.

    If one of them ends, the server ends this process as well, and tells why.
    """

    def __init__(self, tell: Callable[[StartRanks], None]) -> None:
        """`tell` sends a message to the server."""
        self._tell = tell

    def start(self, meeting: StartRanks) -> None:
        self._tell(meeting)

    def ended(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def wait(self, seconds: float) -> None:
        """Return at once: a command to stop has time to leave when its socket closes."""

    def kill(self) -> None:
        """Do nothing, because the server does it."""


def devices_from(rank: int, size: int) -> str:
    """The visible GPUs, beginning with that of a rank, which is then the first of its process."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(size)] if stated is None else stated.split(",")
    return ",".join([*devices[rank:], *devices[:rank]])


class Rendezvous(NamedTuple):
    """The place of a group, as one of its ranks sees it."""

    where: str  # see `collectives.meet`
    host: Host | None = None  # of this process, if the group is on several hosts


def open_rendezvous(hosted: Hosted) -> Rendezvous:
    """Listen on a free port of this host for the ranks of a group. Raises OSError."""
    address = hosted.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    return Rendezvous(f"tcp://{address}:{listener.getsockname()[1]}", Host(address, listener))


def rendezvous_of_engines(
    orders: EngineOrders, hosted: Hosted | None, tell: Callable[[EnginesMeet], None]
) -> Rendezvous:
    """The place of all ranks of the engines that share experts, for the first rank of one of them.

    On several hosts the first engine listens and tells the server, which then starts the others.
    Raises OSError.
    """
    if hosted is None:
        return Rendezvous(f"{orders.folder}/ranks")
    if orders.rendezvous:
        return Rendezvous(orders.rendezvous, Host(hosted.address))
    found = open_rendezvous(hosted)
    tell(EnginesMeet(found.where))
    return found
