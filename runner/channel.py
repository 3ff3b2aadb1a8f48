"""Owns the socket between the server and one worker: lists of messages, one packet each way a step.

A packet travels in frames of bounded size, so that no request can outgrow what the socket takes,
and what requests share travels once.

A pair of ZeroMQ PAIR sockets over a Unix socket in a private folder. The server's end lives on its
event loop and the worker's end blocks or polls; neither knows what the messages mean. A worker that
is started again gets a new channel, so nothing stale can arrive.
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

MAX_FRAME_BYTES = 16 << 20  # a peer that sends a larger one is cut off
# ZeroMQ's input-output threads answer these, so a worker that computes for long still answers and
# only one that is frozen does not.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 30_000
_LINGER_MS = 2_000  # how long the worker's last words may take
_MAX_PATH = 100  # a Unix socket's path must fit into 108 bytes
# A context, its threads and sockets open about twenty. ZeroMQ aborts the whole process if it finds
# none left at the wrong moment, so they are counted before.
_DESCRIPTORS = 32


def _configure(socket: zmq.Socket[bytes], linger_ms: int) -> None:
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, 0)  # no limit: a step never waits for a slow reader
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def _frames(packet: bytes) -> list[memoryview]:
    """The packet in pieces that the socket takes."""
    view = memoryview(packet)
    return [view[at : at + MAX_FRAME_BYTES] for at in range(0, len(packet), MAX_FRAME_BYTES)]


def _joined(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else b"".join(frames)


def _check_descriptors() -> None:
    """OSError if this process cannot open as many more as a channel needs."""
    taken: list[int] = []
    try:
        while len(taken) < _DESCRIPTORS:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in taken:
            os.close(descriptor)


class ServerChannel:
    """The server's end, on the running event loop. Create it before the worker.

    OSError if the machine lacks what it needs; nothing is left behind then.
    """

    def __init__(self) -> None:
        _check_descriptors()
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
        """The socket, and the one that tells about its connection."""
        socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        _configure(cast("zmq.Socket[bytes]", socket), 0)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.bind(self.endpoint)
        return socket, monitor

    def send(self, messages: list[ToWorker]) -> None:
        """Queue one packet; never blocks. A packet to a worker that is gone is dropped."""
        frames = _frames(encoder.encode(list(share(messages))))
        sent = cast("asyncio.Future[None]", self._socket.send_multipart(frames, zmq.NOBLOCK))
        if sent.done() and isinstance(sent.exception(), zmq.Again):
            return  # nobody at the other end: whoever watches the process reports it

    async def receive(self) -> list[FromWorker]:
        """The next packet."""
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
    """The worker's end. `send` may be called from several threads while nobody receives."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _configure(self._socket, _LINGER_MS)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()

    def send(self, messages: list[FromWorker]) -> None:
        """Queue one packet; blocks only until the server's end is there at all."""
        with self._lock:
            self._socket.send_multipart(_frames(encoder.encode(messages)))

    def has_messages(self) -> bool:
        """Whether `receive` would find any without waiting."""
        # Not `poll`, which builds a poller: this is asked in every step.
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[ToWorker]:
        """All messages that wait; if none, wait `timeout` seconds (None: as long as it takes)."""
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
        """Close the socket once what was sent has left, or after two seconds."""
        self._socket.close()
        self._context.term()
