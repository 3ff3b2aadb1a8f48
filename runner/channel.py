"""The socket between the server and one worker; each way, at most one packet of messages per step.

A packet is split into frames of bounded size, because ZeroMQ limits the size of a frame, and a
prompt that several requests share is sent once.

The two ends are ZeroMQ PAIR sockets over a Unix socket in a private folder. The server's end runs
on the event loop; the worker's end blocks or polls. Neither end knows what the messages mean. A
restarted worker gets a new channel, so it cannot receive messages meant for its predecessor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from typing import cast

import zmq
import zmq.asyncio

from .messages import FromWorker, ToWorker, encoder, from_worker_decoder, to_worker_decoder
from .shared_requests import share, unshare

MAX_FRAME_BYTES = 16 << 20  # ZeroMQ disconnects a peer that sends a larger frame
# ZeroMQ's I/O threads answer heartbeats. A worker that computes for long therefore stays connected;
# only a frozen one is disconnected.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 30_000
_LINGER_MS = 2_000  # how long `WorkerChannel.close` waits for unsent messages to leave
_MAX_PATH = 100  # Linux limits the path of a Unix socket to 108 bytes
# A ZeroMQ context with its threads and sockets opens about twenty file descriptors. ZeroMQ aborts
# the whole process if it runs out of them, so their availability is checked first.
_DESCRIPTORS = 32


def _configure(socket: zmq.Socket[bytes], linger_ms: int) -> None:
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, 0)  # unlimited queue: a step never waits for a slow reader
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def _frames(packet: bytes) -> list[memoryview]:
    """Split a packet into frames of at most `MAX_FRAME_BYTES`."""
    view = memoryview(packet)
    return [view[at : at + MAX_FRAME_BYTES] for at in range(0, len(packet), MAX_FRAME_BYTES)]


def _joined(frames: list[bytes]) -> bytes:
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


class ServerChannel:
    """The server's end, bound to the running event loop. Create it before the worker starts.

    Raises OSError, leaving nothing behind, if descriptors, disk space or permissions are lacking.
    """

    def __init__(self) -> None:
        check_descriptors()
        self._folder = tempfile.mkdtemp(prefix="slipstream-")  # mode 0700
        if len(self._folder) > _MAX_PATH - len("/worker"):
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="slipstream-", dir="/tmp")
        self.endpoint = f"ipc://{self._folder}/worker"
        self._context = zmq.asyncio.Context(io_threads=1)
        try:
            self._socket, self._monitor = self._bind()
        except BaseException as error:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, str(error)) from error
            raise

    def _bind(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """The data socket, and the monitor socket that reports a disconnection."""
        socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        _configure(cast("zmq.Socket[bytes]", socket), 0)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.bind(self.endpoint)
        return socket, monitor

    def send(self, messages: list[ToWorker]) -> None:
        """Queue one packet without blocking. Drop it if the worker is gone."""
        frames = _frames(encoder.encode(list(share(messages))))
        sent = cast("asyncio.Future[None]", self._socket.send_multipart(frames, zmq.NOBLOCK))
        if sent.done() and isinstance(sent.exception(), zmq.Again):
            return  # no worker is connected; the process watcher reports its death

    async def receive(self) -> list[FromWorker]:
        """Wait for the next packet and return its messages."""
        return from_worker_decoder.decode(_joined(await self._socket.recv_multipart()))

    async def disconnected(self) -> None:
        """Return once the worker has closed the connection or stopped answering heartbeats."""
        await self._monitor.recv_multipart()

    def close(self) -> None:
        """Close the socket and remove its folder."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class WorkerChannel:
    """The worker's end. Several threads may call `send` as long as no thread is in `receive`."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _configure(self._socket, _LINGER_MS)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()

    def send(self, messages: list[FromWorker]) -> None:
        """Queue one packet. Blocks only while the server's end does not exist yet."""
        with self._lock:
            self._socket.send_multipart(_frames(encoder.encode(messages)))

    def has_messages(self) -> bool:
        """True if `receive` would return messages at once."""
        # Runs in every step, so it avoids `poll`, which builds a poller object each time.
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[ToWorker]:
        """All messages that have arrived; if there are none, wait up to `timeout` seconds for some.

        A `timeout` of None waits without a limit.
        """
        messages: list[ToWorker] = []
        if not self.has_messages():
            if timeout == 0:
                return messages
            if not self._socket.poll(None if timeout is None else int(timeout * 1000)):
                return messages
        while True:
            try:
                packet = _joined(self._socket.recv_multipart(zmq.NOBLOCK))
                messages += unshare(to_worker_decoder.decode(packet))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Send what is queued, for at most two seconds, then close the socket."""
        self._socket.close()
        self._context.term()
