"""The socket between the server and one worker; each way, at most one packet of messages per step.

A prompt that several requests share is sent once. The server's end runs on the event loop; the
worker's end blocks or polls. Neither end knows what the messages mean. A restarted worker gets a
new channel, so it cannot receive messages meant for its predecessor.
"""

from __future__ import annotations

import threading

import zmq

from .group_key import connect
from .messages import FromWorker, ToWorker, encoder, from_worker_decoder, to_worker_decoder
from .pair import ListeningPair, configure, frames_of, joined
from .shared_requests import share, unshare

_LINGER_MS = 2_000  # how long `WorkerChannel.close` waits for unsent messages to leave


class ServerChannel(ListeningPair):
    """The server's end, bound to the running event loop. Create it before the worker starts."""

    def send(self, messages: list[ToWorker]) -> None:
        """Queue one packet without blocking. Drop it if the worker is gone."""
        self.send_packet(encoder.encode(list(share(messages))))

    async def receive(self) -> list[FromWorker]:
        return from_worker_decoder.decode(await self.receive_packet())


class WorkerChannel:
    """The worker's end. Several threads may call `send` as long as no thread is in `receive`."""

    def __init__(self, endpoint: str, key: str = "") -> None:
        """Connect to the server's end; `key` is the group's if that is on another host."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        configure(self._socket, _LINGER_MS)
        if key:
            connect(self._socket, endpoint, key)
        else:
            self._socket.connect(endpoint)
        self._other: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()

    def send(self, messages: list[FromWorker]) -> None:
        """Queue one packet. Blocks only while the server's end does not exist yet."""
        with self._lock:
            self._socket.send_multipart(frames_of(encoder.encode(messages)))

    def has_messages(self) -> bool:
        """True if `receive` would return messages at once."""
        # Runs in every step, so it avoids `poll`, which builds a poller object each time.
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def also_wait_for(self, socket: zmq.Socket[bytes] | None) -> None:
        """Let `receive` return, perhaps without messages, as soon as this socket is readable."""
        self._other = socket

    def _poll(self, timeout: int | None) -> bool:
        """Wait up to `timeout` ms for messages; returns whether there are any."""
        if self._other is None:
            return bool(self._socket.poll(timeout))
        poller = zmq.Poller()
        for socket in (self._socket, self._other):
            poller.register(socket, zmq.POLLIN)
        return any(socket is self._socket for socket, _ in poller.poll(timeout))

    def receive(self, timeout: float | None) -> list[ToWorker]:
        """All messages that have arrived; if there are none, wait up to `timeout` seconds for some.

        A `timeout` of None waits without a limit.
        """
        messages: list[ToWorker] = []
        if not self.has_messages():
            if timeout == 0:
                return messages
            if not self._poll(None if timeout is None else int(timeout * 1000)):
                return messages
        while True:
            try:
                packet = joined(self._socket.recv_multipart(zmq.NOBLOCK))
                messages += unshare(to_worker_decoder.decode(packet))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Send what is queued, for at most two seconds, then close the socket."""
        self._socket.close()
        self._context.term()
