"""The processes of one engine on several nodes, seen as one: if one ends, the engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ...runner.messages import Fatal, StartRanks
from ...runner.process import Hosted, WorkerOrders
from .nodes import Exit, Node, NodeProcess

_CAUSE_SECONDS = 1.0  # for the end that made others end to be known
_RELEASED_SECONDS = 1.0
_CANCELLED_SECONDS = 1.0  # a killed process of this host ends in much less
_KILLED_SECONDS = 5.0  # a node that does not report the end of a killed process is as good as gone

Place = tuple[Node, int]  # a node and one of its devices


class EngineProcesses:
    """An `EngineProcess` with ranks on several nodes. Use it on the event loop."""

    def __init__(self, places: Sequence[Place], orders: WorkerOrders, key: str, name: str) -> None:
        """Start rank 0, the worker; `places` has a device for each rank, `orders` are the worker's.

        `name` is what the engine's lines in the log begin with, if there are several engines.
        Raises OSError.
        """
        self._places, self._orders, self._key, self._name = places, orders, key, name
        self._ends: list[tuple[int, Exit]] = []  # rank, end
        self._news = asyncio.Event()
        self._processes: list[NodeProcess] = []
        self._watches: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self._start(0, "engine.worker", orders)
        self.pid = self._processes[0].pid

    def start_ranks(self, wanted: StartRanks) -> None:
        """Start the ranks 1, 2 ..., for which the worker listens."""
        if len(self._processes) > 1 or len(wanted.commands) != len(self._places) - 1:
            self._fail("the worker asks for ranks that the engine does not have")
            return
        try:
            for rank, endpoint in enumerate(wanted.commands, 1):
                orders = msgspec.structs.replace(
                    self._orders,
                    endpoint=endpoint,
                    answers=wanted.answers,
                    rendezvous=wanted.rendezvous,
                    name=f"slip-rank-{rank}",
                    rank=rank,
                    engine=None,
                )
                self._start(rank, "engine.rank", orders)
        except OSError as error:
            self._fail(f"a tensor-parallel rank cannot be started ({error})")

    async def ended(self) -> str:
        """Wait for the first end of a process; returns a sentence on its cause."""
        while not self._ends and self._failure is None:
            await self._next()
        if self._failure is not None:
            return self._failure
        return await self._violent(_CAUSE_SECONDS) or self._sentence(*self._ends[0])

    async def explained(self, fatal: Fatal) -> Fatal:
        """The worker's last message, unless a process was killed or a node is gone."""
        cause = await self._violent(_CAUSE_SECONDS)
        return fatal if cause is None else Fatal(cause)

    async def stop(self, grace: float) -> None:
        """Wait `grace` s for the processes to exit; then release them, then kill them."""
        if not await self._all_end(grace):
            for process in self._processes:
                process.release()
            await self._all_end(_RELEASED_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the processes and wait for their end, which a cancellation does as well, so that no
        dead process is left behind."""
        try:
            for process in self._processes:
                process.kill()
            await self._all_end(_KILLED_SECONDS)
        except asyncio.CancelledError:
            await self._all_end(_CANCELLED_SECONDS)
            raise
        finally:
            for watch in self._watches:
                watch.cancel()

    def _start(self, rank: int, module: str, orders: WorkerOrders) -> None:
        node, slot = self._places[rank]
        placed = msgspec.structs.replace(
            orders,
            hosted=Hosted(node.address, self._key),
            log_name=f"{self._name}rank {rank}",
        )
        process = node.start(module, placed, slot)
        self._processes.append(process)
        self._watches.append(asyncio.create_task(self._watch(rank, process)))

    async def _watch(self, rank: int, process: NodeProcess) -> None:
        self._ends.append((rank, await process.wait()))
        process.release()
        self._news.set()

    def _fail(self, sentence: str) -> None:
        self._failure = sentence
        self._news.set()

    async def _next(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _all_end(self, seconds: float) -> bool:
        running = {watch for watch in self._watches if not watch.done()}
        if running and seconds > 0:
            _, running = await asyncio.wait(running, timeout=seconds)
        return not running

    async def _violent(self, seconds: float) -> str | None:
        """A sentence on a process that was killed or is lost, if one is known within `seconds`.

        The others may have ended because of it, and be known earlier.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            for rank, end in self._ends:
                if end.status is None or end.status < 0:
                    return self._sentence(rank, end)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(self._next(), left)
            except TimeoutError:
                pass

    def _sentence(self, rank: int, end: Exit) -> str:
        if end.is_lost:
            return end.what
        who = "the worker" if rank == 0 else f"tensor-parallel rank {rank}"
        return f"{who} on {self._places[rank][0].name} {end.what}"
