"""One worker process and its channel: starting it, receiving messages, noticing its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from ...configs.schema import Config
from ...runner.channel import ServerChannel
from ...runner.messages import Fatal, FromWorker, Progress, Ready
from ...runner.process import WorkerOrders, WorkerProcess, describe_exit

ProgressCallback = Callable[[Progress], None]
_LAST_WORDS_SECONDS = 0.3  # time for a Fatal message that arrives after the exit


@dataclass(frozen=True)
class Worker:
    """A worker process and the channel to it."""

    process: WorkerProcess
    channel: ServerChannel

    @classmethod
    def begin(cls, config: Config, engine: str | None, devices: str | None = None) -> Worker:
        """Start the process. Tests pass `engine`, "module:function" of a replacement.

        `devices` are the GPUs that it may see; None: those of this process.

        Raises OSError if file descriptors, processes or the temporary folder are missing.
        """
        channel = ServerChannel()
        try:
            orders = WorkerOrders(
                endpoint=channel.endpoint, parent_pid=os.getpid(), config=config, engine=engine
            )
            variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
            return cls(WorkerProcess(orders, variables), channel)
        except BaseException:
            channel.close()
            raise

    async def started(self, progress: ProgressCallback | None) -> Ready | Fatal:
        """Wait for Ready. Returns Fatal if the worker does not start; it has then been stopped."""
        try:
            outcome = await self.watch(lambda message: _on_start(message, progress))
        except BaseException:
            await self.end()
            raise
        if not isinstance(outcome, Ready):
            await self.end()
        return outcome

    async def end(self, grace: float = 0.0) -> int:
        """Wait up to `grace` s for the process to exit, then kill it; returns its exit status."""
        try:
            return await (self.process.stop(grace) if grace else self.process.kill())
        finally:
            self.channel.close()

    async def watch(
        self,
        handle: Callable[[FromWorker], Ready | Fatal | None],
        hung: Coroutine[None, None, str] | None = None,
    ) -> Ready | Fatal:
        """Handle messages until `handle` returns a result, or the worker exits or hangs.

        Returns the handler's result, or a Fatal that describes the worker's end. `hung` returns a
        sentence when the worker hangs.
        """

        async def read() -> Ready | Fatal:
            while True:
                for message in await self.channel.receive():
                    outcome = handle(message)
                    if outcome is not None:
                        return outcome

        reader = asyncio.create_task(read())
        ended = asyncio.create_task(self.process.wait())
        silent = [asyncio.create_task(each) for each in (self._frozen(), hung) if each is not None]
        tasks = {reader, ended, *silent}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await asyncio.wait({reader}, timeout=_LAST_WORDS_SECONDS)
            if reader.done():
                return reader.result()
            if ended.done():
                return Fatal(f"the worker {describe_exit(ended.result())}")
            return Fatal(next(task.result() for task in silent if task.done()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _frozen(self) -> str:
        await self.channel.disconnected()
        return "the worker stopped answering"


def _on_start(message: FromWorker, progress: ProgressCallback | None) -> Ready | Fatal | None:
    match message:
        case Progress() if progress is not None:
            progress(message)
        case Ready() | Fatal():
            return message
    return None
