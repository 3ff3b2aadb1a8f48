"""Owns the worker process's main loop: drain messages, run a step, send what it brought.

It knows no tensors: everything that computes is behind the engine, which is imported late.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ...configs.logs import configure_logging
from ...configs.options import ConfigError
from ...configs.schema import Config
from ..channel import WorkerChannel
from ..errors import DrafterError, RunnerError, first_line
from ..messages import Fatal, Progress, Ready, Shutdown, StepOutputs, ToWorker
from ..process import WorkerOrders, receive_orders

log = logging.getLogger("slipstream.worker")
# What a user or the machine can cause; anything else is a bug and keeps its class' name.
_OF_USERS = (RunnerError, ConfigError, OSError, ImportError)


class WorkerEngine(Protocol):
    """What the loop needs of an engine."""

    ready: Ready

    def handle(self, messages: list[ToWorker]) -> None:
        """Take in requests and aborts; never raises for a fault of one request."""

    def has_work(self) -> bool:
        """True while a step would do something, a step in flight included."""

    def step(self, interrupted: Callable[[], bool]) -> Sequence[StepOutputs]:
        """Run one step and return what is finished; or, if `interrupted`, leave it running."""

    def shutdown(self) -> None:
        """Stop threads and free devices."""


BuildEngine = Callable[[Config, Callable[[Progress], None]], WorkerEngine]


def find_engine(path: str | None) -> BuildEngine:
    """The engine's builder: ours, or `module:function` for tests."""
    if path is None:
        from .engine import build_engine

        return cast(BuildEngine, build_engine)
    module, _, name = path.partition(":")
    return cast(BuildEngine, getattr(importlib.import_module(module), name))


def tune_garbage_collector() -> None:
    """Look for cycles seldom: a step makes hundreds of lists, all of which go without it."""
    gc.collect()
    gc.freeze()  # what start-up made stays: later collections need not walk it
    gc.set_threshold(50_000, 20, 20)


def run(engine: WorkerEngine, channel: WorkerChannel) -> None:
    """Serve until a Shutdown message. Blocks while there is nothing to do."""
    while True:
        messages = channel.receive(0.0 if engine.has_work() else None)
        if any(isinstance(message, Shutdown) for message in messages):
            return
        if messages:
            engine.handle(messages)
        if engine.has_work():
            outputs = engine.step(channel.has_messages)
            if outputs:
                channel.send([*outputs])


def sentence(error: BaseException) -> str:
    """What went wrong, in one line for a user."""
    text = first_line(error)
    spoken = isinstance(error, (*_OF_USERS, RuntimeError))  # torch tells a device's faults so
    return text if text and spoken else f"{type(error).__name__}: {text}".rstrip(": ")


def serve(orders: WorkerOrders) -> int:
    """Build the engine, say so, run it; returns the exit status."""
    channel = WorkerChannel(orders.endpoint)
    engine: WorkerEngine | None = None
    try:
        build = find_engine(orders.engine)
        engine = build(orders.config, lambda progress: channel.send([progress]))
        tune_garbage_collector()
        channel.send([engine.ready])
        run(engine, channel)
        return 0
    except Exception as error:
        # A bad flag or file needs no traceback; everything else does, and is asked for by users.
        expected = engine is None and isinstance(error, _OF_USERS)
        log.log(logging.DEBUG if expected else logging.ERROR, "the worker ends", exc_info=True)
        channel.send([Fatal(sentence(error), isinstance(error, DrafterError))])
        return 1
    finally:
        if engine is not None:
            engine.shutdown()
        channel.close()


def main() -> int:
    """Entry point of `python -m slipstream.runner.engine.worker`; orders on standard input."""
    faulthandler.enable()
    orders = receive_orders(sys.stdin.buffer)
    server = orders.config.server
    configure_logging(server.log_level, server.log_format, "worker")
    return serve(orders)


if __name__ == "__main__":
    sys.exit(main())
