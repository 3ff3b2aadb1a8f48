"""The processes of one engine and their channel: start, messages, end.

On one host the engine is one worker process, which starts its other ranks itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from ...configs.schema import Config
from ...runner.channel import ServerChannel
from ...runner.messages import EnginesMeet, Fatal, FromWorker, Progress, Ready, StartRanks
from ...runner.process import EngineOrders, WorkerOrders, WorkerProcess, describe_exit

log = logging.getLogger("slipstream.engine")

ProgressCallback = Callable[[Progress], None]
_LAST_WORDS_SECONDS = 0.3  # time for a Fatal message that arrives after the exit


class EngineProcess(Protocol):
    """The processes of one engine, seen as one."""

    @property
    def pid(self) -> int | None:
        """The worker's process id; None on another host."""

    async def ended(self) -> str:
        """Wait for the end of a process that the engine needs; returns a sentence."""

    async def stop(self, grace: float) -> object:
        """Wait `grace` seconds for the processes to exit by themselves, then force them."""

    async def kill(self) -> object:
        """Kill the processes and wait for their end."""

    def start_ranks(self, wanted: StartRanks) -> None:
        """Start the other ranks, because the first one listens for them."""

    async def explained(self, fatal: Fatal) -> Fatal:
        """The worker's last message, or its cause: the end of a process on which it depends."""


class LocalProcess:
    """The worker process of an engine on this host."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self.pid: int | None = process.pid
        self.stop, self.kill = process.stop, process.kill

    async def ended(self) -> str:
        return f"the worker {describe_exit(await self._process.wait())}"

    def start_ranks(self, wanted: StartRanks) -> None:
        raise AssertionError("on one host the worker starts its ranks itself")

    async def explained(self, fatal: Fatal) -> Fatal:
        return fatal


@dataclass(frozen=True)
class Worker:
    """The processes of an engine and the channel to the one that has the scheduler."""

    process: EngineProcess
    channel: ServerChannel

    @classmethod
    def begin(
        cls,
        config: Config,
        engine: str | None,
        devices: str | None = None,
        place: EngineOrders | None = None,
    ) -> Worker:
        """Start the process. Tests pass `engine`, "module:function" of a replacement.

        `devices` are the GPUs that it may see; None: those of this process. `place` is that of its
        engine among those that share the experts.

        Raises OSError if file descriptors, processes or the temporary folder are missing.
        """
        channel = ServerChannel()
        try:
            orders = WorkerOrders(
                channel.endpoint, os.getpid(), config, engine=engine, engines=place
            )
            variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
            return cls(LocalProcess(WorkerProcess(orders, variables)), channel)
        except BaseException:
            channel.close()
            raise

    async def started(
        self,
        progress: ProgressCallback | None,
        *ends: Coroutine[None, None, str],
        met: Callable[[str], None] | None = None,
    ) -> Ready | Fatal:
        """Wait for Ready. Returns Fatal if the worker does not start; it has then been stopped.

        `ends`: as for `watch`. `met`: see `WorkerGroup.met`.
        """

        def on_start(message: FromWorker) -> Ready | Fatal | None:
            if isinstance(message, EnginesMeet) and met is not None:
                met(message.rendezvous)
            return self._on_start(message, progress)

        try:
            outcome = await self.watch(on_start, *ends)
        except BaseException:
            await self.end()
            raise
        if not isinstance(outcome, Ready):
            await self.end()
        return outcome

    async def end(self, grace: float = 0.0) -> None:
        """Wait up to `grace` s for the processes to exit, then kill them."""
        try:
            await (self.process.stop(grace) if grace else self.process.kill())
        finally:
            self.channel.close()

    async def release(self) -> None:
        """Kill the processes that are left, and log what goes wrong."""
        try:
            await self.end()
        except Exception:
            log.exception("cannot release the resources of the ended worker")

    async def watch(
        self,
        handle: Callable[[FromWorker], Ready | Fatal | None],
        *ends: Coroutine[None, None, str],
    ) -> Ready | Fatal:
        """Handle messages until `handle` returns a result, or the worker exits or must end.

        Returns the handler's result, or a Fatal that describes the worker's end. Each of `ends`
        returns a sentence when the worker must end, as when it hangs.
        """

        async def read() -> Ready | Fatal:
            while True:
                for message in await self.channel.receive():
                    outcome = handle(message)
                    if outcome is not None:
                        return outcome

        reader = asyncio.create_task(read())
        ended = asyncio.create_task(self.process.ended())
        silent = [asyncio.create_task(each) for each in (self._frozen(), *ends)]
        tasks = {reader, ended, *silent}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await asyncio.wait({reader}, timeout=_LAST_WORDS_SECONDS)
            if reader.done():
                outcome = reader.result()
                if isinstance(outcome, Fatal):
                    return await self.process.explained(outcome)
                return outcome
            if ended.done():
                return Fatal(ended.result())
            return Fatal(next(task.result() for task in silent if task.done()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_start(
        self, message: FromWorker, progress: ProgressCallback | None
    ) -> Ready | Fatal | None:
        match message:
            case Progress() if progress is not None:
                progress(message)
            case StartRanks():
                self.process.start_ranks(message)
            case Ready() | Fatal():
                return message
        return None

    async def _frozen(self) -> str:
        await self.channel.disconnected()
        return "the worker stopped answering"


_TICKS = 10  # checks within one time-out


class Watchdog:
    """Counts the checks that find the worker busy and silent, instead of measuring seconds.

    If the server itself was suspended for an hour (Ctrl-Z, a frozen container), it counts one check
    and then reads the worker's messages, so there is no false alarm.
    """

    def __init__(self, timeout: float, is_busy: Callable[[], bool]) -> None:
        """`timeout` is in seconds, 0 disables the watchdog; `is_busy` says if a step is due."""
        self._timeout = timeout
        self._is_busy = is_busy
        self._silent = 0

    def feed(self) -> None:
        """Reset the watchdog; called for every message of the worker."""
        self._silent = 0

    async def bite(self) -> None:
        """Return when the worker has been busy and silent for `timeout` seconds."""
        if self._timeout <= 0:
            await asyncio.Event().wait()
        while self._silent <= _TICKS:
            await asyncio.sleep(self._timeout / _TICKS)
            self._silent = self._silent + 1 if self._is_busy() else 0
