"""The socket between the server and one worker; each way, at most one packet of messages per step.

A prompt that several requests share is sent once. The server's end runs on the event loop; the
worker's end blocks or polls. Neither end knows what the messages mean. A restarted worker gets a
new channel, so it cannot receive messages meant for its predecessor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import msgspec
import zmq

from .group_key import connect
from .messages import (
    AddChildren,
    AddRequest,
    Child,
    FromWorker,
    SamplingParams,
    ToWorker,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)
from .pair import ListeningPair, configure, frames_of, joined

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
        # Runs in every step, so it avoids `poll`, which builds a poller object each time.
        """True if `receive` would return messages at once."""
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


_OWN = {"seed", "max_tokens", "prompt_logprobs"}  # the parameters that `Child` carries


def share(messages: Iterable[ToWorker]) -> Iterator[ToWorker | AddChildren]:
    """Yield the messages in order, with adjacent requests of equal parameters packed into one."""
    group: list[AddRequest] = []
    for message in messages:
        if isinstance(message, AddRequest) and (not group or _are_alike(group[0], message)):
            group.append(message)
            continue
        yield from _packed(group)
        group = []
        if isinstance(message, AddRequest):
            group.append(message)
        else:
            yield message
    yield from _packed(group)


def unshare(messages: Iterable[ToWorker | AddChildren]) -> Iterator[ToWorker]:
    """Undo `share`: yield the original messages."""
    for message in messages:
        if isinstance(message, AddChildren):
            yield from message.requests()
        else:
            yield message


def _packed(group: list[AddRequest]) -> Iterator[ToWorker | AddChildren]:
    if len(group) < 2:
        yield from group
        return
    places: dict[int, int] = {}  # id of a prompt -> its index; the group keeps all prompts alive
    prompts: list[list[int]] = []
    children = []
    for request in group:
        prompt, sampling = request.prompt_token_ids, request.sampling
        place = places.setdefault(id(prompt), len(prompts))
        if place == len(prompts):
            prompts.append(prompt)
        own = (sampling.seed, sampling.max_tokens, sampling.prompt_logprobs)
        children.append(Child(request.request_id, place, *own))
    first = group[0]
    yield AddChildren(prompts, first.sampling, children, first.priority, first.cache_salt)


def _are_alike(first: AddRequest, other: AddRequest) -> bool:
    return (
        first.priority == other.priority
        and first.cache_salt == other.cache_salt
        and _share_parameters(first.sampling, other.sampling)
    )


def _share_parameters(first: SamplingParams, other: SamplingParams) -> bool:
    """True if the two differ only in what `Child` carries.

    Lists must be the same objects, since comparing long ones would block the event loop.
    """
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in _OWN:
            mine, others = getattr(first, field.name), getattr(other, field.name)
            if mine is not others and (isinstance(mine, list | dict) or mine != others):
                return False
    return True
