"""The server's client of the worker: starts it, submits requests, restarts it if it dies.

Every submitted request ends: with a finish reason, by an abort, or with EngineDead. This module
knows nothing about text or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace

from ...configs.schema import Config
from ...runner.messages import (
    AbortRequests,
    AddRequest,
    ChangeSpeculator,
    Fatal,
    FromWorker,
    Ready,
    ResetPrefixCache,
    SetVocabulary,
    Shutdown,
    StepOutputs,
    StepStats,
    ToWorker,
)
from ...runner.process import EngineOrders
from ..health import Health, State
from ..request_stream import EngineDead, RequestStream, ShutDown, Turn
from .drafter_changes import DrafterChanges, NextDrafter
from .worker_group import GroupEnded, WorkerGroup
from .worker_watch import ProgressCallback, Watchdog, Worker

__all__ = ["EngineClient", "EngineDead", "RequestStream", "WorkerFailed"]

log = logging.getLogger("slipstream.engine")

StatsCallback = Callable[[StepStats], None]
# Starts the processes of an engine: with its config, the name of a replacement that tests use or
# None, and its place in a group or None. Raises OSError and WorkerFailed.
BeginWorker = Callable[[Config, str | None, EngineOrders | None], Awaitable[Worker]]
_SHUTTING_DOWN = "the server is shutting down"
STOP_SECONDS = 5.0  # time for the step in flight when the worker is told to stop


class WorkerFailed(Exception):
    """The worker did not start. The message is one sentence for the user."""

    def __init__(self, message: str, of_drafter: bool = False) -> None:
        super().__init__(message)
        self.of_drafter = of_drafter  # whether only the drafter kept it from starting


@dataclass(frozen=True)
class Backoff:
    """The delays before restarts of the worker: 1, 2, 4 ... 30 seconds."""

    first: float = 1.0
    longest: float = 30.0
    healthy_after: float = 60.0  # seconds of service after which the delays start over

    def delay(self, failures: int) -> float:
        """Seconds to wait before the next start, after `failures` >= 1 failures in a row."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))


class EngineClient:
    """Runs one worker process. Call its methods only from the event loop's thread."""

    def __init__(
        self,
        config: Config,
        *,
        engine: str | None = None,
        backoff: Backoff | None = None,
        devices: str | None = None,  # CUDA_VISIBLE_DEVICES of its workers; None: the server's own
        begin: BeginWorker | None = None,  # starts a worker on other hosts
        group: WorkerGroup | None = None,  # of the engines that share its experts
        index: int = 0,  # its number among these
    ) -> None:
        self.health = Health()
        self.stats: StatsCallback | None = None  # called once a step, on the event loop
        self._config = config
        self._engine = engine
        self._devices = devices
        self._begin = begin or self._begin_here
        self._group, self._index = group, index
        self._backoff = backoff or Backoff()
        self._ready: Ready | None = None
        self._worker: Worker | None = None
        self._streams: dict[str, RequestStream] = {}
        self._turn = Turn()
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: list[ToWorker] = []
        self._vocabulary: SetVocabulary | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._drafter = NextDrafter(config.speculative)
        self._changes = DrafterChanges(self._post_change, self._drafter.keep)
        self._watchdog = Watchdog(
            config.server.worker_timeout, lambda: bool(self._streams) or self._changes.is_owed
        )

    @property
    def ready(self) -> Ready:
        """The facts that the newest worker reported when it was ready. Only after `start`."""
        assert self._ready is not None, "start() has not returned"
        return self._ready

    @property
    def state(self) -> State:
        return self.health.state

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, or None if no worker runs."""
        return None if self._worker is None else self._worker.process.pid

    @property
    def drafter(self) -> str | None:
        """The folder or hub id of the drafter that was kept last, or else of the configured one."""
        return self._drafter.current.model

    @property
    def drafter_fallback(self) -> str | None:
        """Why a drafter could not be loaded, so that the worker runs with another or none.

        None if every drafter was loaded.
        """
        return self._drafter.fallback

    async def start(self, progress: ProgressCallback | None = None) -> Ready:
        """Start the worker and wait until it is ready. Raises WorkerFailed."""
        try:
            self._ready = await self._launch(progress)
        except WorkerFailed as error:
            self.health.change("failed", str(error))
            raise
        self.health.change("ready")
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._unsupervised)
        return self._ready

    def submit(self, request: AddRequest) -> RequestStream:
        """Submit a request; returns the stream of its outputs. Raises EngineDead unless ready."""
        if self.state != "ready":
            raise self._dead()
        assert request.request_id not in self._streams, f"{request.request_id} is running"
        stream = RequestStream(request.request_id, self._turn)
        self._streams[request.request_id] = stream
        self._idle.clear()
        self._post(request)
        return stream

    def abort(self, request_id: str) -> None:
        """Abort a request and end its stream. Does nothing if it has ended."""
        stream = self._forget(request_id)
        if stream is not None:
            stream.close()
            self._post(AbortRequests([request_id]))

    def set_vocabulary(self, vocabulary: SetVocabulary) -> None:
        self._vocabulary = vocabulary
        if self._worker is not None:
            self._worker.channel.send([vocabulary])

    def reset_prefix_cache(self) -> None:
        """Drop all cached KV blocks that no request uses."""
        self._post(ResetPrefixCache())

    async def change_speculator(self, action: str, model: str = "") -> None:
        """Perform one action of a drafter swap: "load", "try", "keep" or "revert".

        Concurrent calls wait for each other. Raises SpeculatorRefused if the worker refuses, and
        EngineDead if the worker dies or is no longer the one that loaded the drafter.
        """
        await self._changes.perform(action, model)

    async def shutdown(self, drain_timeout: float = 0.0, grace: float = STOP_SECONDS) -> None:
        """Refuse new requests, let open ones finish for `drain_timeout` s, then stop the worker.

        `grace` is the time in seconds for the step in flight; 0 kills the worker at once, as does a
        cancellation.
        """
        await self.drain(drain_timeout)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_streams(_SHUTTING_DOWN, ShutDown)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.channel.send([*self._outbox, Shutdown()])
            try:
                await worker.end(grace)
            except asyncio.CancelledError:  # do not wait for the step in flight
                await worker.end()
                raise

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait until all open ones have ended, at most `timeout` s."""
        if self.state != "failed":
            self.health.change("draining", _SHUTTING_DOWN)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    # --- messages -----------------------------------------------------------------------------

    def _post(self, message: ToWorker) -> None:
        """Queue a message; at the end of a turn of the event loop, all are sent together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _post_change(self, message: ChangeSpeculator) -> None:
        if self.state != "ready":
            raise self._dead()
        self._post(message)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self._worker is not None:
            self._worker.channel.send(messages)

    def _dispatch(self, outputs: StepOutputs) -> None:
        streams = self._streams
        for output in outputs.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # aborted while the step ran
            stream.put(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        if outputs.speculator is not None:
            self._changes.answer(outputs.speculator)
        if self.stats is not None:
            try:
                self.stats(outputs.stats)
            except Exception:  # an error in metrics must not end requests
                log.exception("cannot record the metrics of a step")

    def _forget(self, request_id: str) -> RequestStream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return stream

    def _fail_streams(self, message: str, kind: type[EngineDead] = EngineDead) -> None:
        for request_id in list(self._streams):
            stream = self._forget(request_id)
            assert stream is not None
            stream.fail(kind(message, self.health.report.retry_after))
        self._changes.fail(kind(message, self.health.report.retry_after))

    def _dead(self) -> EngineDead:
        report = self.health.report
        kind = ShutDown if report.state == "draining" else EngineDead
        return kind(report.detail or f"the engine is {report.state}", report.retry_after)

    # --- life of the worker -------------------------------------------------------------------

    async def _begin_here(
        self, config: Config, engine: str | None, place: EngineOrders | None
    ) -> Worker:
        return Worker.begin(config, engine, self._devices, place)

    async def _launch(self, progress: ProgressCallback | None) -> Ready:
        """Start a worker and wait for Ready; stop it and raise WorkerFailed if that fails."""
        config = replace(self._config, speculative=self._drafter.current)
        group, place = self._group, None
        try:
            if group is not None:
                place = await group.join(self._index)
            worker = await self._begin(config, self._engine, place)
        except GroupEnded as error:
            raise WorkerFailed(str(error)) from error
        except WorkerFailed as error:  # as when a node has not joined
            raise WorkerFailed(self._ended(str(error), at_start=True)) from error
        except OSError as error:  # out of file descriptors, processes, memory or disk space
            reason = f"the worker cannot be started ({error})"
            raise WorkerFailed(reason if place is None else self._ended(reason)) from error
        try:
            met = None if group is None else group.met
            outcome = await worker.started(progress, *self._ends(), met=met)
        except BaseException:  # a cancellation; the worker has been stopped
            self._ended("the worker was stopped")
            raise
        if isinstance(outcome, Fatal):
            raise WorkerFailed(self._ended(outcome.message, at_start=True), outcome.of_drafter)
        self._worker = worker
        if self._vocabulary is not None:
            worker.channel.send([self._vocabulary])
        return outcome

    def _ends(self) -> list[Coroutine[None, None, str]]:
        """What may end the worker from outside; see `Worker.watch`."""
        return [] if self._group is None else [self._group.ended(self._index)]

    def _ended(self, reason: str, at_start: bool = False) -> str:
        """Note the worker's end; returns the reason, that of its group if it has one."""
        return reason if self._group is None else self._group.end(self._index, reason, at_start)

    async def _supervise(self) -> None:
        """Watch the worker; when it dies, fail its requests at once and start another."""
        failures = 0
        while True:
            assert self._worker is not None
            worker, began = self._worker, time.monotonic()
            reason = self._ended(await self._why_ended(worker))
            self._worker = None
            if time.monotonic() - began >= self._backoff.healthy_after:
                failures = 0
            failures += 1
            try:
                self._announce(reason, failures)
                self._fail_streams(f"the engine stopped: {reason}")
            finally:
                await worker.release()
            if self.state == "draining":
                return
            failures = await self._restart(failures)

    async def _why_ended(self, worker: Worker) -> str:
        """Handle messages until the worker ends or hangs; returns the reason as a sentence."""
        self._watchdog.feed()
        try:
            outcome = await worker.watch(self._on_message, self._hung(), *self._ends())
        except Exception as error:  # a bug, or an undecodable message
            log.exception("cannot handle the worker's messages")
            return f"its messages cannot be handled ({type(error).__name__})"
        assert isinstance(outcome, Fatal)
        return outcome.message

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        """Report the end of the supervisor, which only a bug or a cancellation can cause."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("the worker is no longer supervised; restart the server", exc_info=error)
        self.health.change("failed", "the worker is no longer supervised; restart the server")
        self._fail_streams("the engine stopped: the worker is no longer supervised")

    async def _hung(self) -> str:
        await self._watchdog.bite()
        return f"the worker finished no step in {self._config.server.worker_timeout:g} s"

    async def _restart(self, failures: int) -> int:
        """Start workers until one is ready; returns the number of failures in a row."""
        while True:
            await asyncio.sleep(self._backoff.delay(failures))
            try:
                self._ready = await self._launch(None)
            except WorkerFailed as error:
                # Engines that step together need the same drafter, so none of them changes it.
                lost = error.of_drafter and self._group is None
                if lost and self._drafter.fall_back(str(error)):
                    self.health.lose_drafter()
                    continue
                failures += 1
                self._announce(str(error), failures)
                continue
            except Exception as error:  # a bug, perhaps temporary: keep trying
                log.exception("the worker cannot be started")
                failures += 1
                self._announce(f"the worker cannot be started ({error!r})", failures)
                continue
            if self.state != "draining":
                self.health.change("ready")
                log.info("the worker is ready again")
            return failures

    def _announce(self, reason: str, failures: int) -> None:
        """Report the end of the worker to the log and the health."""
        delay = self._backoff.delay(failures)
        log.error("%s; starting the worker again in %g s", reason, delay)
        if self.state != "draining":
            self.health.change("restarting", f"the engine is restarting: {reason}", delay)

    def _on_message(self, message: FromWorker) -> Fatal | None:
        self._watchdog.feed()
        match message:
            case StepOutputs():
                self._dispatch(message)
            case Fatal():
                return message
        return None
