"""Several engines behind one server: replicas of the model, each with a worker of its own.

An engine that dies is restarted alone, and the others go on. A request goes to an engine of the
least loaded, that with most of its prompt cached.
"""

from __future__ import annotations

import asyncio
import glob
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...configs.schema import Config
from ...runner.messages import AddRequest, Ready, SetVocabulary, StepStats
from ..health import HealthReport, State, joint_report
from ..request_stream import RequestStream, SpeculatorRefused
from .engine_client import STOP_SECONDS, BeginWorker, EngineClient, WorkerFailed
from .worker_group import WorkerGroup
from .worker_watch import ProgressCallback


class _JointHealth:
    """The health of all engines together, read like `health.Health`."""

    def __init__(self, clients: list[EngineClient]) -> None:
        self._clients = clients

    @property
    def report(self) -> HealthReport:
        return joint_report([client.health.report for client in self._clients])

    @property
    def state(self) -> State:
        return self.report.state


class Engines:
    """Has the methods of one `EngineClient`. Call them only from the event loop's thread."""

    def __init__(self, clients: list[EngineClient], group: WorkerGroup | None = None) -> None:
        """`group`: that of the clients, if the engines share their experts."""
        self.clients = clients
        self._group = group
        self.stats: Callable[[StepStats], None] | None = None  # each client has its own
        self.health: Any = _JointHealth(clients)
        self._router = Router(len(clients))
        self._restarts = [0] * len(clients)
        self._joined: tuple[list[Ready], Ready] | None = None

    @property
    def ready(self) -> Ready:
        """The facts of the engines, which are equal but for the requests that they hold together.

        Only after `start`.
        """
        facts = [client.ready for client in self.clients]
        if self._joined is None or any(
            a is not b for a, b in zip(self._joined[0], facts, strict=True)
        ):
            most = sum(ready.max_num_seqs for ready in facts)
            self._joined = facts, msgspec.structs.replace(facts[0], max_num_seqs=most)
        return self._joined[1]

    @property
    def state(self) -> State:
        return self.health.report.state  # type: ignore[no-any-return]

    @property
    def num_open(self) -> int:
        return sum(client.num_open for client in self.clients)

    @property
    def drafter(self) -> str | None:
        return self.clients[0].drafter

    @property
    def drafter_fallback(self) -> str | None:
        return next((c.drafter_fallback for c in self.clients if c.drafter_fallback), None)

    async def start(self, progress: ProgressCallback | None = None) -> Ready:
        """Start all workers and wait until they are ready; `progress` is the first one's.

        Raises WorkerFailed, after stopping the others, if one does not start.
        """
        starts = [
            asyncio.create_task(client.start(progress if index == 0 else None))
            for index, client in enumerate(self.clients)
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException as error:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            if isinstance(error, WorkerFailed):
                await self._all(lambda client: client.shutdown(grace=0.0))
            if self._group is not None:
                self._group.close()
            raise
        return self.ready

    def submit(self, request: AddRequest) -> RequestStream:
        """Submit a request to one engine. Raises EngineDead unless one is ready."""
        loads = [c.num_open if c.state == "ready" else None for c in self.clients]
        for index, client in enumerate(self.clients):
            if (restarts := client.health.report.restarts) != self._restarts[index]:
                self._restarts[index] = restarts
                self._router.forget(index)
        chosen = self._router.choose(request.prompt_token_ids, request.cache_salt, loads)
        index = 0 if chosen is None else chosen
        stream = self.clients[index].submit(request)
        stream.engine = index
        return stream

    def abort(self, request_id: str) -> None:
        for client in self.clients:  # only the one that has it does anything
            client.abort(request_id)

    def set_vocabulary(self, vocabulary: SetVocabulary) -> None:
        for client in self.clients:
            client.set_vocabulary(vocabulary)

    def reset_prefix_cache(self) -> None:
        for index, client in enumerate(self.clients):
            client.reset_prefix_cache()
            self._router.forget(index)

    async def change_speculator(self, action: str, model: str = "") -> None:
        """Refuse: engines with different drafters would have to be compared."""
        raise SpeculatorRefused("drafters cannot be swapped with --data-parallel-size above 1")

    async def shutdown(self, drain_timeout: float = 0.0, grace: float = STOP_SECONDS) -> None:
        if self._group is not None:  # none of them can finish its requests without the others
            await self.drain(drain_timeout)
            drain_timeout = 0.0
        await self._all(lambda client: client.shutdown(drain_timeout, grace))
        if self._group is not None:
            self._group.close()

    async def drain(self, timeout: float) -> None:
        await self._all(lambda client: client.drain(timeout))

    async def _all(self, action: Callable[[EngineClient], Coroutine[None, None, None]]) -> None:
        await asyncio.gather(*(action(client) for client in self.clients))


def create_engine(
    config: Config,
    engine: str | None = None,
    begin_of: Callable[[int], BeginWorker] | None = None,
) -> EngineClient | Engines:
    """The client of the configured engines; `engine`: see `EngineClient`. Starts nothing.

    `begin_of` makes the function that starts the worker of an engine, by the engine's number, if
    processes run on several hosts. Raises WorkerFailed if the machine has too few GPUs.
    """
    count, size = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    if count == 1:
        return EngineClient(config, engine=engine, begin=begin_of and begin_of(0))
    is_here = begin_of is None and config.model.device != "cpu"
    devices = visible_devices() if is_here else []
    if devices and len(devices) < count * size:
        raise WorkerFailed(
            f"--data-parallel-size {count} with --tensor-parallel-size {size} needs "
            f"{count * size} GPUs, but this machine shows {len(devices)}"
        )
    own = replace(config, parallel=replace(config.parallel, data_parallel_size=1))
    if config.parallel.shares_experts:
        return _sharing_engines(config, engine, devices, begin_of)
    clients = []
    for index in range(count):
        part = devices[index * size : (index + 1) * size]
        begin = begin_of and begin_of(index)
        named = ",".join(part) or None
        clients.append(EngineClient(own, engine=engine, devices=named, begin=begin))
    return Engines(clients)


def _sharing_engines(
    config: Config,
    engine: str | None,
    devices: list[str],
    begin_of: Callable[[int], BeginWorker] | None,
) -> Engines:
    """Engines that share their experts. On one host each sees all GPUs of the group, its own
    first."""
    count, size = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    group, clients = WorkerGroup(count, on_hosts=begin_of is not None), []
    for index in range(count):
        part = [*devices[index * size : count * size], *devices[: index * size]]
        seen = ",".join(part) or None
        begin = begin_of and begin_of(index)
        clients.append(
            EngineClient(config, engine=engine, devices=seen, begin=begin, group=group, index=index)
        )
    return Engines(clients, group)


def visible_devices() -> list[str]:
    """The GPUs that workers may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        return [name.strip() for name in stated.split(",") if name.strip()]
    return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]


_TOKENS = 64  # of a block of a prompt that is remembered
_MOST_BLOCKS = 1 << 16  # remembered for each engine: four million tokens
_SLACK_SHARE = 8  # an engine with up to 1 / 8 more open requests counts as least loaded, too


class Router:
    """Remembers prompts by engine. An engine that has restarted must be `forget`ten."""

    def __init__(self, count: int) -> None:
        # hash of a prompt up to the end of a block, by engine; the most recently sent last
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self._turn = 0  # the engine that is preferred if all else is equal

    def choose(
        self, prompt: Sequence[int], salt: str, num_open: Sequence[int | None]
    ) -> int | None:
        """The engine for a prompt; None if none is ready. Remembers that it gets this prompt.

        `num_open`: the open requests of each engine, None for those that are not ready.
        """
        loads = [load for load in num_open if load is not None]
        if not loads:
            return None
        most = min(loads) + max(1, min(loads) // _SLACK_SHARE)
        blocks = _blocks(prompt, salt)
        best, chosen = (-1, 0, 0), 0
        for engine, load in enumerate(num_open):
            if load is None or load > most:
                continue
            turn = (engine - self._turn) % len(num_open)
            rank = (self._num_known(engine, blocks), -load, -turn)
            if rank > best or best[0] < 0:
                best, chosen = rank, engine
        self._turn = (chosen + 1) % len(num_open)
        self._remember(chosen, blocks)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget the prompts of an engine whose cache is empty."""
        self._sent[engine].clear()

    def _num_known(self, engine: int, blocks: Sequence[int]) -> int:
        sent = self._sent[engine]
        return next((i for i, block in enumerate(blocks) if block not in sent), len(blocks))

    def _remember(self, engine: int, blocks: Sequence[int]) -> None:
        sent = self._sent[engine]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > _MOST_BLOCKS:
            sent.popitem(last=False)


def _blocks(prompt: Sequence[int], salt: str) -> list[int]:
    """The hashes of the prompt up to the end of each whole block."""
    found, last = [], hash(salt)
    for start in range(0, len(prompt) - _TOKENS + 1, _TOKENS):
        last = hash((last, *prompt[start : start + _TOKENS]))
        found.append(last)
    return found
