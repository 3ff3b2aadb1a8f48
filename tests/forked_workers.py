"""Worker processes that are forks of one process which has imported torch and transformers.

A test that needs several workers with real models would else spend most of its time on imports. It
changes only how the process begins: tests/end_to_end starts workers as the server does.

As a script, it is that process. It gets one message for each worker on its standard input, a
socket: JSON with the module and the environment, and the worker's standard input and error. It
answers with the worker's number, and later tells that number and the worker's exit status.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

PACKAGE = "slipstream.runner"
TICK_SECONDS = 0.02  # after which the end of a worker is noticed


class Nursery:
    """Starts workers as forks of a process of its own. A context, which ends that process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=theirs,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._lines = self._socket.makefile("r")
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()
        self._process.wait(10)

    def start(self, command: list[str], env: dict[str, str], **_: Any) -> ForkedWorker:
        """Start the worker that `subprocess.Popen` would start."""
        read, write = os.pipe()
        message = {"module": command[-1], "env": env, "parent": os.getpid()}
        socket.send_fds(self._socket, [json.dumps(message).encode() + b"\n"], [read, 2])
        os.close(read)
        while True:
            line = json.loads(self._lines.readline())
            if isinstance(line, int):
                return ForkedWorker(self, line, write)
            self._note(line)

    def status(self, pid: int) -> int | None:
        """The exit status of a worker, None while it runs."""
        while pid not in self._statuses and select.select([self._socket], [], [], 0)[0]:
            self._note(json.loads(self._lines.readline()))
        return self._statuses.get(pid)

    def _note(self, ended: list[int]) -> None:
        self._statuses[ended[0]] = ended[1]


class ForkedWorker:
    """What `runner.process` uses of a `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int) -> None:
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.status(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(TICK_SECONDS)
        return status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


# --- in the process that is forked --------------------------------------------------------------


def become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Become a worker, with these files as its standard input and error."""
    code = 1
    try:
        for target, file in zip((0, 2), files, strict=True):
            os.dup2(file, target)
            os.close(file)
        os.dup2(2, 1)
        sys.stdin = os.fdopen(0, closefd=False)
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(order["env"])
        os.getppid = lambda: int(order["parent"])  # the worker ends without its parent
        sys.argv = [order["module"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else ending.code is not None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork workers until the socket is closed."""
    orders = socket.socket(fileno=os.dup(0))
    gc.freeze()
    while True:
        if select.select([orders], [], [], TICK_SECONDS)[0]:
            data, files, _, _ = socket.recv_fds(orders, 1 << 20, 2)
            if not data:
                return
            while not data.endswith(b"\n"):
                data += orders.recv(1 << 20)
            if not (pid := os.fork()):
                orders.close()
                become(json.loads(data), files)
            for file in files:
                os.close(file)
            orders.sendall(b"%d\n" % pid)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                line = [ended[0], os.waitstatus_to_exitcode(ended[1])]
                orders.sendall(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    from transformers import AutoConfig, DeepseekV3Config  # noqa: F401

    import slipstream.runner.engine.engine  # noqa: F401

    main()
