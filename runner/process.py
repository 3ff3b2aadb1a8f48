"""Starts and ends the worker process, and guarantees that it never outlives the server.

It knows nothing of engines and imports nothing heavy: the child imports torch, the parent must not.
The child reads its orders from its standard input and exits when that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from ..configs.schema import Config

MIN_ADDRESS_SPACE = 1 << 30  # bytes; torch alone maps 0.6 GiB
_POLL_SECONDS = 0.05
_CANCELLED_SECONDS = 1.0  # a killed process ends in much less
_OUT_OF_MEMORY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)  # how C code dies without memory
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


class Hosted(msgspec.Struct, frozen=True):
    """What a process needs whose engine may have ranks on other hosts."""

    address: str  # of its own host, numeric: there the first rank listens for the others
    key: str  # of the group; see `group_key`


class EngineOrders(msgspec.Struct, frozen=True):
    """The place of a worker among the engines that share their experts."""

    engine: int
    size: int  # number of engines
    folder: str  # where they meet on one host; no earlier group has used it
    rendezvous: str = ""  # on several hosts: where all ranks meet; "" = this engine chooses it


class WorkerOrders(msgspec.Struct, frozen=True):
    """The start-up arguments of a worker, sent as one line of JSON on its standard input."""

    endpoint: str
    parent_pid: int
    config: Config
    engine: str | None = None  # "module:function" that tests call instead of `engine.build_engine`
    name: str = "slip-worker"  # the process name that ps shows; at most 15 bytes
    rank: int = 0  # of a group of ranks that share a model; rank 0 is the server's worker
    rendezvous: str = ""  # where the ranks find each other, see `parallel.collectives`
    answers: str = ""  # the endpoint to which a rank other than 0 sends its answers
    hosted: Hosted | None = None  # None: all processes of the engine are on this host
    log_name: str = ""  # the process's name in the log; "": worker, or the rank's number
    engines: EngineOrders | None = None  # None: its engine shares nothing with others


class WorkerProcess:
    """A running worker process. Await `stop` or `kill` before dropping it."""

    def __init__(
        self,
        orders: WorkerOrders,
        variables: Mapping[str, str] | None = None,
        module: str = "engine.worker",
    ) -> None:
        """Start the process, with `variables` in its environment.

        Raises OSError if the machine or its limits prevent it.
        """
        self._process = start_process(module, orders, variables)
        self.pid = self._process.pid

    async def wait(self) -> int:
        """Wait for the process to end and return its exit status, or minus the fatal signal's
        number."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    async def stop(self, grace: float) -> int:
        """Wait `grace` seconds for the worker to exit by itself, then force it; return its status.

        Closing the worker's standard input comes first, because the worker ignores SIGTERM. Service
        managers send that to every process at once, and the worker must keep running while the
        server drains. If it still runs a second later, it is killed.
        """
        for seconds in (grace, 1.0):
            try:
                return await asyncio.wait_for(self.wait(), seconds)
            except TimeoutError:
                pass
            finally:
                self.release()
        return await self.kill()

    async def kill(self) -> int:
        """Kill the process and return its status, which a cancellation reads as well, so that no
        dead process is left behind."""
        self._process.kill()
        self.release()
        try:
            return await self.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CANCELLED_SECONDS)
            raise

    def send_kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        """Close the process's standard input, at which it ends itself."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass


def start_process(
    module: str, orders: WorkerOrders, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module of this package as a process with these orders.

    `variables` are added to its environment. Raises OSError if the machine or its limits prevent
    it.
    """
    _check_address_space()
    package = __package__ or ""
    root = sys.modules[package.partition(".")[0]].__path__[0]
    paths = [str(Path(root).parent), os.environ.get("PYTHONPATH", "")]
    line = msgspec.json.encode(orders) + b"\n"
    # -P keeps the current folder off sys.path: it may hold a package named `kernels`, which
    # transformers would import. The worker gets its own process group, so that Ctrl-C in a
    # terminal reaches only the server, which drains first.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", f"{package}.{module}"],
        stdin=subprocess.PIPE,
        stdout=2,
        process_group=0,
        env={
            **os.environ,
            **(variables or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the child died at once; its status says so
    return process


def end_now(status: int) -> NoReturn:
    """End this process at once, whatever its other threads and its device do."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def describe_exit(status: int) -> str:
    """`was killed by SIGKILL` or `ended with status 1`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    limit = _address_space() if number in _OUT_OF_MEMORY else None
    hint = "" if limit is None else f"; its address space is limited to {_mib(limit)} (ulimit -v)"
    return f"was killed by {number.name}{hint}"


def _address_space() -> int | None:
    """The limit on this process's address space, which its children inherit; None if unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _check_address_space() -> None:
    limit = _address_space()
    if limit is not None and limit < MIN_ADDRESS_SPACE:
        raise OSError(
            f"its address space is limited to {_mib(limit)} (ulimit -v), and it needs at least "
            f"{_mib(MIN_ADDRESS_SPACE)} besides the model's weights and KV cache"
        )


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


# --- in the child -----------------------------------------------------------------------------


def follow_parent() -> None:
    """On Linux, have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def receive_orders(stdin: IO[bytes]) -> WorkerOrders:
    """Read the orders, and start a thread that exits this process when the parent closes the pipe.

    Also ignores SIGINT, SIGTERM and SIGHUP.
    """
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
    if os.getppid() != orders.parent_pid:  # the parent died before `follow_parent`
        os._exit(1)

    descriptor = stdin.fileno()

    def end_with_parent() -> None:
        # Reads the descriptor, not `stdin`: this thread would hold the stream's lock, and Python
        # aborts at exit if a daemon thread holds it.
        try:
            while os.read(descriptor, 4096):
                pass
        finally:
            os._exit(1)  # the parent closed the pipe or died, or reading failed

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    return orders
