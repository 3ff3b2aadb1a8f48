"""The first node's port on which the others join, and the nodes that have joined."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection

import msgspec
import zmq
import zmq.asyncio

from ...runner.group_key import listen
from ...runner.pair import Listening, ListeningPair, check_descriptors
from .agreement import disagreement
from .node_messages import MAX_JOIN_BYTES, Join, Refused, Welcome, encoder, join_decoder
from .nodes import Node, RemoteNode

log = logging.getLogger("slipstream.hosts")

_CONNECT_SECONDS = 20.0  # for a node to connect after it was welcomed
_PATIENCE_SECONDS = 5.0  # before the log says which nodes are awaited


class NotJoined(Exception):
    """Nodes are missing. The message is one sentence for the user."""


class Hub:
    """Lets nodes join, also again after they were lost. Use it on the event loop."""

    def __init__(
        self,
        own: Join,
        listening: Listening,
        port: int,
        num_slots: int,
        local: Node | None,
        on_leave: Callable[[str], None],
    ) -> None:
        """Listen on a port of this host; 0 picks a free one.

        `own` is what all nodes must agree with, `num_slots` the devices that each needs, `local`
        this host as node 0, if it runs processes. `on_leave` is called with the name of a node that
        was asked to end. Raises OSError.
        """
        self._own, self._listening, self._num_slots = own, listening, num_slots
        self._local, self._on_leave = local, on_leave
        self._nodes: dict[int, RemoteNode] = {}
        self._news = asyncio.Event()
        check_descriptors()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set(zmq.MAXMSGSIZE, MAX_JOIN_BYTES)
        try:
            self.endpoint = listen(self._socket, listening.address, listening.key, port)
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, str(error)) from error
            raise
        self._answering = asyncio.create_task(self._answer(), name="hub")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def joined(self, number: int) -> Node | None:
        """A node, or None if it has not joined or is gone."""
        if number == 0 and self._local is not None:
            return self._local
        node = self._nodes.get(number)
        return node if node is not None and node.is_joined and not node.is_gone else None

    async def nodes(self, numbers: Collection[int], timeout: float) -> dict[int, Node]:
        """Wait until some nodes have joined. Raises NotJoined after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        began, is_told = loop.time(), False
        while missing := [number for number in sorted(numbers) if self.joined(number) is None]:
            names = f"node {', '.join(map(str, missing))}"
            waited = loop.time() - began
            if waited >= timeout:
                raise NotJoined(
                    f"{names} of {self._own.nnodes} did not join within {timeout:g} s: check that "
                    f"it runs and reaches port {self.port} of {self._listening.address}"
                )
            if waited >= _PATIENCE_SECONDS and not is_told:
                log.info("waiting for %s to join at %s", names, self.endpoint)
                is_told = True
            self._news.clear()
            pause = min(timeout - waited, _PATIENCE_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, pause))
        return {number: node for number in numbers if (node := self.joined(number)) is not None}

    async def close(self) -> None:
        """Tell all nodes that the server has stopped, and stop listening."""
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        await asyncio.gather(*(node.close(True) for node in list(self._nodes.values())))
        self._context.destroy(linger=0)

    async def _answer(self) -> None:
        """Answer nodes that ask to join. The key has already kept strangers out."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                join = join_decoder.decode(frames[-1])
                reply = self._reply(join)
            except msgspec.MsgspecError:
                reply = Refused("the first node does not understand this node: use one version")
            except OSError as error:
                reply = Refused(f"the first node cannot let another one join ({error})", True)
            if isinstance(reply, Refused) and not reply.is_early:
                log.warning("refused a node: %s", reply.message)
            await self._socket.send_multipart([*frames[:-1], encoder.encode(reply)])

    def _reply(self, join: Join) -> Welcome | Refused:
        if (why := disagreement(self._own, join, self._num_slots)) is not None:
            return Refused(why)
        former = self._nodes.get(join.node)
        if former is not None and not former.is_gone:
            if former.is_joined:
                why = f"node {join.node} has joined already, from {former.address}"
                return Refused(why, is_early=True)
            asyncio.get_running_loop().create_task(former.close(False))
        pair = ListeningPair(self._listening)
        node = RemoteNode(join.node, join.address, pair, self._changed, self._on_leave)
        self._nodes[join.node] = node
        asyncio.get_running_loop().call_later(_CONNECT_SECONDS, self._forget_silent, node)
        return Welcome(node.endpoint)

    def _forget_silent(self, node: RemoteNode) -> None:
        if not node.is_joined and not node.is_gone:
            asyncio.get_running_loop().create_task(node.close(False))

    def _changed(self, node: RemoteNode) -> None:
        if node.is_joined and not node.is_closing:
            log.log(
                logging.WARNING if node.is_gone else logging.INFO,
                "%s %s",
                node.name,
                "is gone" if node.is_gone else "has joined",
            )
        self._news.set()
