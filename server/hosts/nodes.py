"""The nodes as the server sees them: it starts processes on them and learns how these end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from ...runner.pair import ListeningPair
from ...runner.process import WorkerOrders, WorkerProcess, describe_exit
from .node_messages import (
    Bye,
    Ended,
    Hello,
    Kill,
    Leaving,
    NotStarted,
    Release,
    Start,
    ToNode,
    encoder,
    from_node_decoder,
)

log = logging.getLogger("slipstream.hosts")

_BYE_SECONDS = 2.0  # for a last message to leave


class Exit(NamedTuple):
    what: str  # "was killed by SIGKILL"; of a node that is lost, the whole sentence
    status: int | None  # None: the process is lost with its node, or was never started
    is_lost: bool = False  # with its node


class NodeProcess(Protocol):
    @property
    def pid(self) -> int | None:
        """Its number on this host; None on another."""

    async def wait(self) -> Exit:
        """Wait for its end."""

    def kill(self) -> None:
        """Kill it."""

    def release(self) -> None:
        """Let it end itself, as when its parent ends."""


class Node(Protocol):
    """A host, or with Ray a part of one, that runs processes."""

    number: int
    address: str  # numeric
    is_local: bool

    @property
    def name(self) -> str:
        """What a user knows it by."""

    def start(self, module: str, orders: WorkerOrders, slot: int) -> NodeProcess:
        """Start a process on the node's device `slot`. Raises OSError."""


def devices_of(visible: list[str], slot: int) -> dict[str, str]:
    """The variables of the process in a slot: the GPUs, its own first; empty without GPUs."""
    if not visible:
        return {}
    turn = slot % len(visible)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*visible[turn:], *visible[:turn]])}


class _LocalProcess:
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self.pid: int | None = process.pid

    async def wait(self) -> Exit:
        status = await self._process.wait()
        return Exit(describe_exit(status), status)

    def kill(self) -> None:
        self._process.send_kill()

    def release(self) -> None:
        self._process.release()


class LocalNode:
    """The server's own host, node 0."""

    number, is_local = 0, True

    def __init__(self, address: str, visible_devices: list[str]) -> None:
        self.address = address
        self._visible = visible_devices

    @property
    def name(self) -> str:
        return f"node 0 ({self.address})"

    def start(self, module: str, orders: WorkerOrders, slot: int) -> NodeProcess:
        mine = msgspec.structs.replace(orders, parent_pid=os.getpid())
        variables = devices_of(self._visible, slot)
        return _LocalProcess(WorkerProcess(mine, variables, module))


class _RemoteProcess:
    pid: int | None = None

    def __init__(self, number: int, send: Callable[[ToNode], None]) -> None:
        self._number, self._send = number, send
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        return await asyncio.shield(self.exit)

    def kill(self) -> None:
        if not self.exit.done():
            self._send(Kill(self._number))

    def release(self) -> None:
        if not self.exit.done():
            self._send(Release(self._number))

    def end(self, how: Exit) -> None:
        if not self.exit.done():
            self.exit.set_result(how)


class RemoteNode:
    """A node that joins over a pair of sockets. Create it on the event loop."""

    is_local = False

    def __init__(
        self,
        number: int,
        address: str,
        pair: ListeningPair,
        changed: Callable[[RemoteNode], None],  # called when it has joined and when it is gone
        on_leave: Callable[[str], None],  # called with its name when it was asked to end
    ) -> None:
        self.number, self.address = number, address
        self.endpoint = pair.endpoint  # where its agent is to connect
        self.is_joined = self.is_gone = self.is_closing = False
        self._pair, self._changed, self._on_leave = pair, changed, on_leave
        self._processes: dict[int, _RemoteProcess] = {}
        self._next = 0
        self._serving = asyncio.create_task(self._serve(), name=f"node {number}")

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.address})"

    def start(self, module: str, orders: WorkerOrders, slot: int) -> NodeProcess:
        self._next += 1
        process = self._processes[self._next] = _RemoteProcess(self._next, self._send)
        if self.is_gone:
            self._lose(process)
        else:
            self._send(Start(self._next, module, orders, slot))
        return process

    async def close(self, is_orderly: bool) -> None:
        """Tell the node that the server has stopped, if that is so, and close its sockets."""
        self.is_closing = True
        if self.is_joined and not self.is_gone and is_orderly:
            self._send(Bye())
            await asyncio.wait({self._serving}, timeout=_BYE_SECONDS)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    def _send(self, message: ToNode) -> None:
        self._pair.send_packet(encoder.encode(message))

    async def _serve(self) -> None:
        """Read the node's messages until it is gone; then all its processes are lost."""
        reader = asyncio.create_task(self._read())
        ended = asyncio.create_task(self._pair.disconnected())
        try:
            await asyncio.wait({reader, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, ended):
                task.cancel()
            await asyncio.gather(reader, ended, return_exceptions=True)
            self.is_gone = True
            self._pair.close()
            for process in self._processes.values():
                self._lose(process)
            self._changed(self)

    def _lose(self, process: _RemoteProcess) -> None:
        process.end(Exit(f"{self.name} is gone", None, is_lost=True))

    async def _read(self) -> None:
        while True:
            packet = await self._pair.receive_packet()
            try:
                self._take(packet)
            except msgspec.MsgspecError:
                log.exception("%s sends what is no message", self.name)
                return

    def _take(self, packet: bytes) -> None:
        match from_node_decoder.decode(packet):
            case Hello():
                self.is_joined = True
                self._changed(self)
            case Ended(number, status) if number in self._processes:
                self._processes.pop(number).end(Exit(describe_exit(status), status))
            case NotStarted(number, reason) if number in self._processes:
                self._processes.pop(number).end(Exit(f"cannot be started ({reason})", None))
            case Leaving():
                self._on_leave(self.name)
