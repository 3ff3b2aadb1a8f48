"""The two ends of a ZeroMQ PAIR connection, on the event loop: packets out, packets in, its end.

The listening end is a Unix socket in a private folder or, with a group's key, a port of this host.
A packet is split into frames of bounded size, because ZeroMQ limits the size of a frame.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from typing import Any, NamedTuple, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .group_key import connect, listen

MAX_FRAME_BYTES = 16 << 20  # ZeroMQ disconnects a peer that sends a larger frame
_ENVELOPE = 64  # bytes that encryption adds to a frame; CURVE's are 33
# ZeroMQ's I/O threads answer heartbeats. A worker that computes for long therefore stays connected;
# only a frozen one is disconnected.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 30_000
_MAX_PATH = 100  # Linux limits the path of a Unix socket to 108 bytes
# A ZeroMQ context with its threads and sockets opens about twenty file descriptors. ZeroMQ aborts
# the whole process if it runs out of them, so their availability is checked first.
_DESCRIPTORS = 32
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Listening(NamedTuple):
    """Where a pair between hosts listens."""

    address: str  # of this host, numeric
    key: str  # see `group_key.derive_key`


def configure(socket: Any, linger_ms: int) -> None:
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, 0)  # unlimited queue: a step never waits for a slow reader
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _ENVELOPE)


def frames_of(packet: bytes) -> list[memoryview]:
    """Split a packet into frames of at most `MAX_FRAME_BYTES`."""
    view = memoryview(packet)
    return [view[at : at + MAX_FRAME_BYTES] for at in range(0, len(packet), MAX_FRAME_BYTES)]


def joined(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else b"".join(frames)


def check_descriptors() -> None:
    """Raise OSError if this process cannot open the file descriptors that a channel needs."""
    taken: list[int] = []
    try:
        while len(taken) < _DESCRIPTORS:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)


class _Pair:
    """What both ends share: a context with one socket and its monitor."""

    def __init__(self) -> None:
        check_descriptors()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        configure(self._socket, 0)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._is_met = False  # whether a peer has passed the handshake
        self._is_guarded = False  # whether strangers may try to connect
        self._peer: int | None = (
            None  # the descriptor of its connection, once it has sent something
        )

    def send_packet(self, packet: bytes) -> None:
        """Queue one packet without blocking. Drop it if the peer is gone."""
        sent = cast(
            "asyncio.Future[None]",
            self._socket.send_multipart(frames_of(packet), zmq.NOBLOCK),
        )
        if sent.done() and isinstance(sent.exception(), zmq.Again):
            return  # no peer is connected; whoever watches its process reports its death

    async def receive_packet(self) -> bytes:
        if not self._is_guarded:
            return joined(await self._socket.recv_multipart())
        frames = await self._socket.recv_multipart(copy=False)
        self._peer = int(frames[0].get(zmq.SRCFD))
        return joined([frame.bytes for frame in frames])

    async def connected(self) -> None:
        """Return once a peer has passed the handshake."""
        while not self._is_met:
            await self._next_event()

    async def disconnected(self) -> None:
        """Return once the peer has closed the connection or stopped answering heartbeats.

        The connections of strangers, which fail in the handshake, do not count.
        """
        while not await self._next_event():
            pass

    async def _next_event(self) -> bool:
        """Note the next event of a connection; True if the peer's connection has ended."""
        event = parse_monitor_message(await self._monitor.recv_multipart())
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_met = True
            return False
        # Of a handshake ZeroMQ does not say whose it was, so the peer is known by what it sent.
        return self._is_met and self._peer in (None, int(event["value"]))

    def close(self, linger: float = 0.0) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=int(1e3 * linger))


class ListeningPair(_Pair):
    """The end that listens, and to which one peer connects.

    Raises OSError, leaving nothing behind, if descriptors, disk space or permissions are lacking.
    """

    def __init__(self, listening: Listening | None = None) -> None:
        self._folder = ""
        super().__init__()
        try:
            self.endpoint = self._bind(listening)
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, str(error)) from error
            raise

    def _bind(self, listening: Listening | None) -> str:
        if listening is not None:
            self._is_guarded = True
            return listen(self._socket, listening.address, listening.key)
        self._folder = tempfile.mkdtemp(prefix="slipstream-")  # mode 0700
        if len(self._folder) > _MAX_PATH - len("/worker"):
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="slipstream-", dir="/tmp")
        endpoint = f"ipc://{self._folder}/worker"
        self._socket.bind(endpoint)
        return endpoint

    def close(self, linger: float = 0.0) -> None:
        super().close(linger)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class ConnectedPair(_Pair):
    """The end that connects, once, to a listening pair of another host."""

    def __init__(self, endpoint: str, key: str) -> None:
        super().__init__()
        self._socket.set(zmq.RECONNECT_IVL, -1)  # a second connection would be another peer's
        connect(self._socket, endpoint, key)
