"""The worker process's main loop: read messages, run a step, send its outputs.

It knows no tensors: the engine does all computing, and is imported late.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from ...configs.logs import configure_logging
from ...configs.options import ConfigError
from ...configs.schema import Config
from ..channel import WorkerChannel
from ..errors import DrafterError, RunnerError, first_line
from ..messages import Fatal, Progress, Shutdown
from ..parallel.group import RankFailed
from ..process import EngineOrders, Hosted, WorkerOrders, end_now, receive_orders

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("slipstream.worker")
OTHER_ENGINES_SECONDS = 1.0  # for the server to notice that another engine has died
# Errors that a user or the machine can cause. Any other is a bug, so its class is named.
_OF_USERS = (RunnerError, ConfigError, OSError, ImportError)


# The function that it gets sends a message to the server.
BuildEngine = Callable[[Config, Callable[[Progress | Fatal], None]], "Engine"]


def find_engine(
    path: str | None, hosted: Hosted | None = None, engines: EngineOrders | None = None
) -> BuildEngine:
    """The function that builds the engine: ours, or the `module:function` that a test names.

    `hosted` and `engines`: see `WorkerOrders`.
    """
    if path is None:
        gc.disable()  # what torch's modules make stays; to look through it is a tenth of the import
        try:
            from .engine import build_engine
        finally:
            gc.enable()
        return cast(BuildEngine, partial(build_engine, hosted=hosted, orders=engines))
    module, _, name = path.partition(":")
    return cast(BuildEngine, getattr(importlib.import_module(module), name))


def tune_garbage_collector() -> None:
    """Run Python's cycle collector seldom: a step makes hundreds of lists, and none is in a
    cycle."""
    gc.collect()
    gc.freeze()  # objects from start-up stay, so later collections can skip them
    gc.set_threshold(50_000, 20, 20)


def run(engine: Engine, channel: WorkerChannel) -> None:
    """Serve until a `Shutdown` message arrives. Blocks while there is nothing to do."""
    idle = engine.idle_seconds
    while True:
        messages = channel.receive(0.0 if engine.has_work() else idle)
        if idle is not None:
            engine.check()
        if any(isinstance(message, Shutdown) for message in messages):
            return
        if messages:
            engine.handle(messages)
        if engine.has_work():
            outputs = engine.step(channel.has_messages)
            if outputs:
                channel.send([*outputs])


def sentence(error: BaseException) -> str:
    """One line for a user that says what went wrong."""
    text = first_line(error)
    is_readable = isinstance(error, (*_OF_USERS, RuntimeError))  # torch's class for device faults
    return text if text and is_readable else f"{type(error).__name__}: {text}".rstrip(": ")


def serve(orders: WorkerOrders) -> int:
    """Build the engine, report `Ready`, and run it until shutdown; returns the exit status."""
    key = "" if orders.endpoint.startswith("ipc:") or orders.hosted is None else orders.hosted.key
    channel = WorkerChannel(orders.endpoint, key)
    engine: Engine | None = None
    try:
        build = find_engine(orders.engine, orders.hosted, orders.engines)
        engine = build(orders.config, lambda message: channel.send([message]))
        channel.also_wait_for(engine.calls)
        tune_garbage_collector()
        channel.send([engine.ready])
        run(engine, channel)
        return 0
    except Exception as error:
        if orders.engines is not None and _is_stopped_for_another(channel):
            return 0
        # A bad flag or file needs no traceback; every other error does, for a bug report.
        expected = engine is None and isinstance(error, _OF_USERS)
        log.log(logging.DEBUG if expected else logging.ERROR, "the worker ends", exc_info=True)
        channel.send([Fatal(sentence(error), isinstance(error, DrafterError))])
        if isinstance(error, RankFailed) or (engine is not None and orders.engines is not None):
            channel.close()  # this device may wait for the other rank for ever
            end_now(1)
        return 1
    finally:
        if engine is not None:
            engine.shutdown()
        channel.close()


def _is_stopped_for_another(channel: WorkerChannel) -> bool:
    """Wait, after an error that the end of another engine may have caused, for the server to stop
    this one; True if it did.

    The server kills it, without a wait, if the other has died.
    """
    deadline = time.monotonic() + OTHER_ENGINES_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if any(isinstance(message, Shutdown) for message in channel.receive(left)):
            return True
    return False


def main() -> int:
    """Entry point of `python -m slipstream.runner.engine.worker`; reads its orders from stdin."""
    faulthandler.enable()
    orders = receive_orders(sys.stdin.buffer)
    server = orders.config.server
    configure_logging(server.log_level, server.log_format, orders.log_name or "worker")
    status = serve(orders)
    if orders.config.parallel.tensor_parallel_size > 1 or orders.engines is not None:
        end_now(status)  # communicators may wait for graphs that still hold them
    return status


if __name__ == "__main__":
    sys.exit(main())
