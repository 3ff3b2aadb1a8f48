"""The engines of `-dp` that share their experts, as a rank of one of them sees them.

They step together while any has work. When none has, they rest, and the first that gets a request
calls the others. A *wave* is the time between two rests; calls name it, so that a late one wakes
nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from ...configs.schema import ParallelConfig
from ..group_key import connect, listen
from ..process import EngineOrders, Hosted
from .experts import ExpertRanks, RowExchange
from .ranks import Communicator, Silent

_MAX_BYTES = 4096  # of a frame between hosts, those of CURVE's handshake included


class Calls:
    """Messages that call resting engines to the next step.

    One thread may call `send` and another the other methods.
    """

    def __init__(self, orders: EngineOrders, hosted: Hosted | None = None) -> None:
        """`hosted`: where this engine listens if they are on several hosts; `meet` must follow.

        Raises zmq.ZMQError if the folder of the orders cannot hold sockets.
        """
        self._engine, self._hosted = orders.engine, hosted
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.socket = self._socket(zmq.PULL)  # readable if `heard` may return something
        self._others: list[zmq.Socket[bytes]] = []
        if hosted is not None:
            self.socket.set(zmq.MAXMSGSIZE, _MAX_BYTES)
            self.endpoint = listen(self.socket, hosted.address, hosted.key)
            return
        self.endpoint = _address(orders.folder, orders.engine)
        self.socket.bind(self.endpoint)
        self.meet([_address(orders.folder, engine) for engine in range(orders.size)])

    def meet(self, endpoints: Sequence[str]) -> None:
        """Connect to the other engines, of which these are the endpoints, by engine."""
        for engine, endpoint in enumerate(endpoints):
            if engine == self._engine:
                continue
            other = self._socket(zmq.PUSH)
            self._others.append(other)
            if self._hosted is None:
                other.connect(endpoint)
            else:
                connect(other, endpoint, self._hosted.key)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        return socket

    def send(self, wave: int) -> None:
        """Call all other engines to this wave. Never waits."""
        for socket in self._others:
            socket.send(str(wave).encode())

    def heard(self) -> int | None:
        """The newest wave to which other engines have called since the last time."""
        newest: int | None = None
        while True:
            try:
                newest = int(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return newest

    def close(self) -> None:
        self._context.destroy(linger=0)


def _address(folder: str, engine: int) -> str:
    return f"ipc://{folder}/engine{engine}"


@dataclass(frozen=True)
class EngineGroup:
    """The group, as one rank of an engine sees it."""

    rank: int  # this engine's number
    size: int  # number of engines
    experts: ExpertRanks
    host: Communicator  # of the engines, for numbers on the host
    calls: Calls | None = None  # of the engine's first rank

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over the engines. Start-up only."""
        return self.host.least(values)


def silent_group(config: ParallelConfig, device: Any) -> EngineGroup | None:
    """The group of a dry start, in which nothing is exchanged; None if engines share no experts."""
    if not config.shares_experts:
        return None
    engines, ranks = config.data_parallel_size, config.tensor_parallel_size
    is_all_to_all = config.all2all_backend == "all_to_all"
    exchange = RowExchange(Silent(engines), engines, device, is_all_to_all)
    return EngineGroup(0, engines, ExpertRanks(0, engines * ranks, exchange), Silent(engines))
