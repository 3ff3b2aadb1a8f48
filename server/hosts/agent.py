"""The agent of a node other than the first: it joins, starts processes as told, and ends with it.

It has no HTTP server and no model. Its processes are children, which end when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ...configs.logs import configure_logging
from ...configs.schema import Config
from ...runner.group_key import NoSuchHost, connect, derive_key, endpoint_of, own_address, resolve
from ...runner.pair import ConnectedPair
from ...runner.process import WorkerProcess
from ..engine.engines import visible_devices
from .agreement import HostsError, membership
from .node_messages import (
    MAX_JOIN_BYTES,
    MODULES,
    Bye,
    Ended,
    FromNode,
    Hello,
    Join,
    Kill,
    Leaving,
    NotStarted,
    Refused,
    Release,
    Start,
    Welcome,
    encoder,
    reply_decoder,
    to_node_decoder,
)
from .nodes import devices_of

log = logging.getLogger("slipstream.hosts")

_REPLY_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_BYE_SECONDS = 1.0  # for last messages to leave
_REFUSALS = 3  # failed handshakes after which the key is taken to be another
_FORCED = 130  # exit status after a second Ctrl-C
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Agent:
    """One node's agent. Use it on one event loop."""

    def __init__(self, me: Join, master: str, port: int, key: str, timeout: float) -> None:
        """`me` is this node without its address; `master` and `port` are those of the first one.

        `timeout` is in seconds, for the first node to answer.
        """
        self._me, self._master, self._port = me, master, port
        self._key, self._timeout = key, timeout
        self._pair: ConnectedPair | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._refusals = 0
        self._is_ending = False

    @property
    def has_joined(self) -> bool:
        """Whether the first node knows this one."""
        return self._pair is not None

    async def run(self) -> None:
        """Join, and follow the first node until it stops. Raises HostsError, also if it is lost."""
        try:
            await self._run()
        except msgspec.MsgspecError as error:
            log.debug("a message of node 0 cannot be read", exc_info=True)
            raise HostsError(
                "node 0 sends what this node does not understand: install the same version of "
                "slipstream on both"
            ) from error

    async def _run(self) -> None:
        pair = self._pair = await self._join()
        where = f"{self._master}:{self._port}"
        log.info("node %d has joined node 0 at %s", self._me.node, where)
        follower = asyncio.create_task(self._follow(pair))
        lost = asyncio.create_task(pair.disconnected())
        try:
            await asyncio.wait({follower, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not follower.done():
                raise HostsError(f"node 0 at {where} is gone, so this node ends")
            follower.result()
        finally:
            self._is_ending = True  # that its processes end says nothing any more
            for task in (follower, lost):
                task.cancel()
            await asyncio.gather(follower, lost, return_exceptions=True)
            await asyncio.gather(*(process.kill() for process in self._processes.values()))
            await asyncio.gather(*self._watches, return_exceptions=True)
            pair.close(_BYE_SECONDS)

    def leave(self) -> None:
        self._send(Leaving())

    # --- joining ------------------------------------------------------------------------------

    async def _join(self) -> ConnectedPair:
        loop = asyncio.get_running_loop()
        deadline, why = loop.time() + self._timeout, "it did not answer"
        while True:
            try:
                return await self._attempt()
            except NoSuchHost as error:
                raise HostsError(f"cannot resolve --master-addr {self._master}: {error}") from error
            except (TimeoutError, OSError) as error:
                why = str(error) or why
            if loop.time() >= deadline:
                raise HostsError(
                    f"cannot join node 0 at {self._master}:{self._port} within "
                    f"{self._timeout:g} s ({why}): check --master-addr and --master-port"
                )
            await asyncio.sleep(_RETRY_SECONDS)

    async def _attempt(self) -> ConnectedPair:
        """Ask once to join. Raises TimeoutError or OSError if a later attempt may succeed."""
        address = await asyncio.to_thread(resolve, self._master, self._port)
        me = msgspec.structs.replace(self._me, address=own_address(address, self._port))
        reply = await self._ask(me, endpoint_of(address, self._port))
        if isinstance(reply, Refused):
            if reply.is_early:
                raise TimeoutError(reply.message)
            raise HostsError(reply.message)
        pair = ConnectedPair(reply.endpoint, self._key)
        try:
            await asyncio.wait_for(pair.connected(), _REPLY_SECONDS)
        except BaseException:
            pair.close()
            raise
        pair.send_packet(encoder.encode(Hello()))
        return pair

    async def _ask(self, me: Join, endpoint: str) -> Welcome | Refused:
        context = zmq.asyncio.Context(io_threads=1)
        asking: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        asking.set(zmq.MAXMSGSIZE, MAX_JOIN_BYTES)
        failing = asyncio.create_task(
            self._count_refusals(asking.get_monitor_socket(_HANDSHAKE_FAILED))
        )
        answered: asyncio.Future[bytes] | None = None
        try:
            connect(asking, endpoint, self._key)
            await asking.send(encoder.encode(me))
            answered = asyncio.ensure_future(asking.recv())
            either = asyncio.FIRST_COMPLETED
            patience = min(_REPLY_SECONDS, self._timeout)
            await asyncio.wait({answered, failing}, timeout=patience, return_when=either)
            if answered.done():
                found: Welcome | Refused = reply_decoder.decode(answered.result())
                return found
            if failing.done():
                raise HostsError(
                    f"node 0 at {self._master}:{self._port} does not know this node's secret: "
                    "set the same --group-key on all nodes"
                )
            raise TimeoutError
        finally:
            waiting = [task for task in (failing, answered) if task is not None]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            asking.disable_monitor()
            context.destroy(linger=0)

    async def _count_refusals(self, monitor: zmq.asyncio.Socket) -> None:
        """Return once the handshake has failed so often that the key must be another."""
        while self._refusals < _REFUSALS:
            parse_monitor_message(await monitor.recv_multipart())
            self._refusals += 1

    # --- following ----------------------------------------------------------------------------

    async def _follow(self, pair: ConnectedPair) -> None:
        """Do what the first node says, until it says goodbye."""
        while True:
            match to_node_decoder.decode(await pair.receive_packet()):
                case Start() as start:
                    self._start(start)
                case Kill(number) if number in self._processes:
                    self._processes[number].send_kill()
                case Release(number) if number in self._processes:
                    self._processes[number].release()
                case Bye():
                    return

    def _start(self, start: Start) -> None:
        assert start.module in MODULES, "the first node is another version"
        orders = msgspec.structs.replace(start.orders, parent_pid=os.getpid())
        visible = [] if orders.config.model.device == "cpu" else visible_devices()
        try:
            process = WorkerProcess(orders, devices_of(visible, start.slot), start.module)
        except OSError as error:
            self._send(NotStarted(start.process, str(error)))
            return
        self._processes[start.process] = process
        watch = asyncio.create_task(self._watch(start.process, process))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, number: int, process: WorkerProcess) -> None:
        status = await process.wait()
        process.release()
        del self._processes[number]
        self._send(Ended(number, status))

    def _send(self, message: FromNode) -> None:
        if self._pair is not None and not self._is_ending:
            self._pair.send_packet(encoder.encode(message))


def agent_of(config: Config, me: Join, master: str, port: int, secret: str) -> Agent:
    """The agent of this host, with the number of its GPUs. Raises OSError without CURVE."""
    shown = 0 if config.model.device == "cpu" else len(visible_devices())
    me = msgspec.structs.replace(me, num_devices=shown)
    return Agent(me, master, port, derive_key(secret), config.hosts.join_timeout)


def follow(config: Config) -> int:
    """Run this host as a node that joins the first one; returns the exit status.

    SIGTERM asks the first node to drain and stop. Errors are printed, not raised.
    """
    hosts, server = config.hosts, config.server
    configure_logging(server.log_level, server.log_format, f"node {hosts.node_rank}")
    assert hosts.group_key is not None, "the configuration was checked"
    try:
        me = membership(config, hosts.node_rank, hosts.nnodes)
        agent = agent_of(config, me, hosts.master_addr, hosts.master_port, hosts.group_key)
        print(
            f"Node {hosts.node_rank} of {hosts.nnodes} joins node 0 at "
            f"{hosts.master_addr}:{hosts.master_port}",
            flush=True,
        )
        return asyncio.run(_until_signal(agent))
    except (HostsError, OSError) as error:
        print(f"slipstream serve: error: {error}", file=sys.stderr)
        return 1


async def _until_signal(agent: Agent) -> int:
    running = asyncio.create_task(agent.run())
    stop, force = asyncio.Event(), asyncio.Event()
    with _signals(stop, force):
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and agent.has_joined:
            log.info("asking node 0 to drain and stop; Ctrl-C again to stop now")
            agent.leave()
            forcing = asyncio.create_task(force.wait())
            await asyncio.wait({running, forcing}, return_when=asyncio.FIRST_COMPLETED)
            forcing.cancel()
        stopping.cancel()
        if not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            return _FORCED if force.is_set() else 0
        running.result()
        return 0


@contextlib.contextmanager
def _signals(stop: asyncio.Event, force: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        (force if stop.is_set() else stop).set()

    handlers = {signal.SIGTERM: stop.set, signal.SIGINT: interrupted}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handlers[signal.SIGHUP] = stop.set
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
