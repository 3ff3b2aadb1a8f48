"""Runs the server process from the first check to the exit status: port, worker, HTTP, signals.

It does not import torch and knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from ...configs.hosts import uses_hosts
from ...configs.logs import configure_logging
from ...configs.schema import Config, ServerConfig
from ...runner.messages import SetVocabulary
from ..engine.engine_client import STOP_SECONDS, BeginWorker, EngineClient, WorkerFailed
from ..engine.engines import Engines, create_engine
from ..off_loop import in_daemon_thread
from ..progress import StartupProgress

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("slipstream.server")

T = TypeVar("T")

_FORCED = 130  # exit status after a second Ctrl-C
_KEEP_ALIVE_SECONDS = 75  # longer than most clients' own, so that clients close first
_UNSENT_BYTES = 128 << 10  # a fast network sends less in a turn of the event loop
_CLOSE_SECONDS = 5  # time for the last bytes of responses after the drain
# "module:function" that builds a replacement of the engine, for tests of this process.
Client = EngineClient | Engines
_ENGINE_VARIABLE = "SLIPSTREAM_TEST_ENGINE"


class LaunchError(Exception):
    """The server cannot start. The message is one sentence for the user."""


def serve(config: Config) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status. Errors are printed, not raised."""
    if config.hosts.node_rank > 0:
        from ..hosts.agent import follow

        return follow(config)
    configure_logging(config.server.log_level, config.server.log_format, "server")
    try:
        with bind(config.server) as listener:
            return _run(config, listener)
    except (LaunchError, WorkerFailed) as error:
        log.debug("the server cannot start", exc_info=True)
        print(f"slipstream serve: error: {error}", file=sys.stderr)
        return 1


def _run(config: Config, listener: socket.socket) -> int:
    launch = Launch(config, listener)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(launch.run())
    return uvloop.run(launch.run())


def bind(server: ServerConfig) -> socket.socket:
    """Bind the listening socket, before any other work. Raises LaunchError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        why = getattr(error, "strerror", None) or "it is not a valid host name"
        raise LaunchError(f"cannot resolve --host {server.host}: {why}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unsent := getattr(socket, "TCP_NOTSENT_LOWAT", None):
            # Accepted sockets inherit it. Without it, the kernel buffers megabytes for a client
            # that does not read, so that the server notices late.
            listener.setsockopt(socket.IPPROTO_TCP, unsent, _UNSENT_BYTES)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(server, error) from None
    return listener


def _unusable(server: ServerConfig, error: OSError) -> LaunchError:
    why = (error.strerror or str(error)).lower()
    if error.errno == errno.EADDRNOTAVAIL:
        return LaunchError(f"cannot bind to {server.host}: it is not an address of this machine")
    where = f"port {server.port} of {server.host}"
    return LaunchError(f"cannot listen on {where} ({why}): choose another with --port")


class Launch:
    """One run of the server, on its event loop."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    async def run(self) -> int:
        """Start everything, wait for a signal, drain; returns the exit status."""
        with self._signals():
            if not uses_hosts(self._config):
                await self._run(None)
            else:
                from ..hosts.executor import HostsExecutor

                async with HostsExecutor(self._config, self._leave) as executor:
                    await self._run(executor.begin_of)
        return _FORCED if self._force.is_set() else 0

    def _leave(self, node: str) -> None:
        """Stop as at SIGTERM, because a node on which engines depend was asked to end."""
        log.warning("%s is stopping, and so is this server", node)
        self._stop.set()

    async def _run(self, begin_of: Callable[[int], BeginWorker] | None) -> None:
        client = create_engine(self._config, os.environ.get(_ENGINE_VARIABLE), begin_of)
        try:
            server = await self._unless_stopped(self._start(client))
            if server is not None:
                await self._serve(server, client)
        finally:
            if not self._force.is_set():
                await self._first(client.shutdown(grace=STOP_SECONDS), self._force.wait())
            await client.shutdown(grace=0.0)

    async def _start(self, client: Client) -> uvicorn.Server:
        """Check the model's files, then start the worker and create the app at the same time.

        Returns the HTTP server, which is not listening yet.
        """
        await in_daemon_thread(_check_model, self._config)
        worker = asyncio.create_task(_start_worker(client))
        await asyncio.sleep(0)  # let the worker's process start first
        try:
            making = in_daemon_thread(_create_app, self._config, client)
            # Whichever fails first ends the start at once.
            _, (app, vocabulary) = await asyncio.gather(worker, making)
            client.set_vocabulary(vocabulary)
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        return uvicorn.Server(_uvicorn_config(self._config, app))

    async def _unless_stopped(
        self, start: Coroutine[None, None, uvicorn.Server]
    ) -> uvicorn.Server | None:
        """The server that `start` returns, or None if a signal came first."""
        starting = asyncio.create_task(start)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None

    async def _serve(self, server: uvicorn.Server, client: Client) -> None:
        """Serve requests until a signal; then drain, abort the rest, and close."""
        with _settled_heap():
            await self._answer(server, client)

    async def _answer(self, server: uvicorn.Server, client: Client) -> None:
        try:
            self._listener.listen(2048)
        except OSError as error:  # another process has started to listen since `bind`
            raise _unusable(self._config.server, error) from None
        # `_serve` and not `serve`: uvicorn's own signal handlers would close before the drain.
        serving = asyncio.create_task(server._serve([self._listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            _say(_greeting(self._config, client, self._listener))
        await self._first(serving, self._stop.wait())
        if not serving.done():
            log.info("finishing %d open requests; Ctrl-C again to stop now", client.num_open)
            await self._first(client.drain(self._config.server.drain_timeout), self._force.wait())
            server.should_exit = True
            if not self._force.is_set():
                await self._first(client.shutdown(grace=STOP_SECONDS), self._force.wait())
            if not self._force.is_set():
                await self._first(serving, self._force.wait())
            if self._force.is_set():
                server.force_exit = True
                await client.shutdown(grace=0.0)
        await serving

    @staticmethod
    async def _first(*awaitables: Coroutine[None, None, object] | asyncio.Task[None]) -> None:
        """Wait until one awaitable is done; cancel the other coroutines, but not the tasks."""
        tasks = [a if isinstance(a, asyncio.Task) else asyncio.create_task(a) for a in awaitables]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ours = [task for task, given in zip(tasks, awaitables, strict=True) if task is not given]
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain on SIGTERM, Ctrl-C or a closed terminal; a second Ctrl-C stops at once."""
        loop = asyncio.get_running_loop()
        asking = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # keep SIGHUP ignored under nohup
            asking.append(signal.SIGHUP)

        def interrupted() -> None:
            (self._force if self._stop.is_set() else self._stop).set()

        for number in asking:
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            for number in asking:
                loop.remove_signal_handler(number)
            loop.remove_signal_handler(signal.SIGINT)


async def _start_worker(client: Client) -> None:
    with StartupProgress() as progress:
        await client.start(progress)


@contextlib.contextmanager
def _settled_heap() -> Iterator[None]:
    """Exclude the objects made at start-up from garbage collection.

    Scanning them would delay every stream.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _check_model(config: Config) -> None:
    """Raise LaunchError if the model's files show that it cannot be served."""
    from .model_files import ModelFilesError, check_model_files

    try:
        check_model_files(config)
    except (ModelFilesError, OSError) as error:
        raise LaunchError(str(error).rstrip(".")) from error


def _create_app(config: Config, client: Client) -> tuple[FastAPI, SetVocabulary]:
    """The app, and the vocabulary to send to the worker.

    Raises LaunchError if the tokenizer or chat template cannot be loaded.
    """
    from ..text.tokenizer_source import TokenizerLoadError

    source = config.model.tokenizer or config.model.model
    try:
        from .app import create_app

        app = create_app(config, client, source)
    except (TokenizerLoadError, ValueError, OSError) as error:
        raise LaunchError(str(error).rstrip(".")) from error
    return app, app.state.services.vocabulary()


def _uvicorn_config(config: Config, app: FastAPI) -> uvicorn.Config:
    from ..http.connection import connection_factory

    server = config.server
    if server.log_level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        log_config=None,  # its loggers propagate to ours
        access_log=False,  # `RequestScope` writes it
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        http=connection_factory(server.client_timeout),
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        server_header=False,
        ws="none",
        lifespan="off",  # unused, and a second Ctrl-C would log its cancellation
    )


def _say(text: str) -> None:
    """Print a line. Errors, such as a full disk or a closed pipe, are ignored."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # else the line is flushed again at exit


def _greeting(config: Config, client: Client, listener: socket.socket) -> str:
    """What is printed when the server is ready: model, URL, device, speculation, live page."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.server.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    ready = client.ready
    drafts = "off"
    if ready.speculative_method != "off":
        upto = "" if config.speculative.num_speculative_tokens else "up to "
        drafts = f"{ready.speculative_method} with {upto}{ready.num_speculative_tokens} drafts"
    name = config.server.served_model_name[0]
    numbers = ready.dtype + (f", {ready.weight_formats} weights" if ready.weight_formats else "")
    live = f"\nIts live page is {url}/live" if config.server.live_page else ""
    return f"Serving {name} at {url} ({ready.device}, {numbers}, speculation: {drafts}){live}"
