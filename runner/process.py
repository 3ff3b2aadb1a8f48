"""Owns the worker as a process: how it starts, how it ends, and that it never outlives the server.

It knows nothing of engines and imports nothing heavy: the child imports torch, the parent must not.
The child reads its orders from its standard input; while that stays open the parent lives.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from ..configs.schema import Config

_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


class WorkerOrders(msgspec.Struct, frozen=True):
    """What a worker is told at its start."""

    endpoint: str
    parent_pid: int
    config: Config
    engine: str | None = None  # "module:function" in place of `engine.build_engine`, for tests
    name: str = "slip-worker"  # shown by ps; 15 bytes at most


class WorkerProcess:
    """A running worker. `stop` or `kill` must be awaited before it is dropped."""

    def __init__(self, orders: WorkerOrders) -> None:
        package = __package__ or ""
        root = sys.modules[package.partition(".")[0]].__path__[0]
        paths = [str(Path(root).parent), os.environ.get("PYTHONPATH", "")]
        line = msgspec.json.encode(orders) + b"\n"
        # -P: the current folder may hold a `kernels`, and transformers imports one if it finds it.
        # A process group of its own: Ctrl-C in a terminal is for the server, which drains first.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{package}.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=2,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once: `wait` tells how

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit status (minus the signal's number if a signal ended it), once it has ended."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    async def stop(self, grace: float) -> int:
        """Wait `grace` seconds for an end that was asked for, then end it; returns the status.

        The middle step closes the worker's standard input, which ends it as SIGTERM would: it
        ignores the signal itself, because service managers send that to every process at once
        and the worker must live on while the server drains.
        """
        for seconds in (grace, 1.0):
            try:
                return await asyncio.wait_for(self.wait(), seconds)
            except TimeoutError:
                pass
            finally:
                self._close_stdin()
        return await self.kill()

    async def kill(self) -> int:
        """End it now."""
        self._process.kill()
        self._close_stdin()
        return await self.wait()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass


def describe_exit(status: int) -> str:
    """`was killed by SIGKILL` or `ended with status 1`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


# --- in the child -----------------------------------------------------------------------------


def follow_parent() -> None:
    """Have the kernel end this process when its parent ends, where the kernel is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def receive_orders(stdin: IO[bytes]) -> WorkerOrders:
    """Read the orders, and from then on end with the parent, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = stdin.readline()
    if not line:
        raise SystemExit(1)
    orders = msgspec.json.decode(line, type=WorkerOrders)
    follow_parent()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, orders.name.encode(), 0, 0, 0)
    if os.getppid() != orders.parent_pid:  # it died before the request above
        os._exit(1)

    descriptor = stdin.fileno()

    def end_with_parent() -> None:
        # Not through `stdin`: a lock that this thread held would make a clean exit fatal.
        try:
            while os.read(descriptor, 4096):
                pass
        finally:
            os._exit(1)  # the parent closed the pipe or is gone, or nobody could tell

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    return orders
