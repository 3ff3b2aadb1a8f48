"""The first rank's side of a group: starts the other ranks, tells them what to run, watches them.

A rank that dies, or whose tokens differ, ends the group: `check` raises one sentence, and if the
main thread hangs in a collective that will never end, the process ends itself. The server then
starts a new worker, and with it a new group.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from ...configs.schema import Config
from ..channel import check_descriptors
from ..errors import RunnerError
from ..process import WorkerOrders, describe_exit, start_process
from .commands import (
    Answer,
    Command,
    Digests,
    DrafterLoaded,
    RankFault,
    Stop,
    answer_decoder,
    encoder,
)

logger = logging.getLogger(__name__)

_POLL_MS = 50  # how often processes are looked at
_LAST_WORDS_SECONDS = 0.5  # time for the sentence of a rank that has ended
_CAUSE_SECONDS = 0.1
_NOTICE_SECONDS = 1.5  # for the watching thread to see a rank's end after a collective has failed
_GRACE_SECONDS = 2.0  # for the main thread to report the end of the group itself
_STOP_SECONDS = 2.0  # at shutdown, for the ranks to exit


class RankFailed(RunnerError):
    """A rank has ended or computed something else, so that the group cannot go on."""


class RankGroup:
    """The ranks 1, 2 ... of a group, as processes of this machine. Used by rank 0."""

    on_drafter: Callable[[DrafterLoaded], None] | None = None  # called in a thread

    def __init__(self, config: Config, on_hang: Callable[[str], None]) -> None:
        """Start the processes. `on_hang` is called in a thread if the group has failed and the
        main thread has not reported it within two seconds. Raises OSError."""
        self.size = config.parallel.tensor_parallel_size
        self._on_hang = on_hang
        self._folder = tempfile.mkdtemp(prefix="slipstream-ranks-")  # mode 0700
        self.rendezvous = f"{self._folder}/group"
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._digests = Digests(self.size)
        check_descriptors()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._commands: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._answers = self._bind("answers", zmq.PULL)
            for rank in range(1, self.size):
                self._commands.append(self._bind(f"rank{rank}", zmq.PUSH))
                orders = WorkerOrders(
                    f"ipc://{self._folder}",
                    os.getpid(),
                    config,
                    name=f"slip-rank-{rank}",
                    rank=rank,
                    rendezvous=self.rendezvous,
                )
                devices = {"CUDA_VISIBLE_DEVICES": devices_from(rank, self.size)}
                self._processes.append(start_process("engine.rank", orders, devices))
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def send(self, command: Command) -> None:
        """Send a command to every other rank. Never waits."""
        packet = encoder.encode(command)
        for socket in self._commands:
            socket.send(packet)

    def check(self) -> None:
        """Raise RankFailed if the group has failed."""
        if self._failure is not None:
            raise RankFailed(self._failure)

    @contextmanager
    def faults(self) -> Iterator[None]:
        """A context that turns the error of a collective, which another rank's end caused, into
        RankFailed with the sentence of that rank."""
        try:
            yield
        except RankFailed:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and self._waited_for_failure():
                raise RankFailed(str(self._failure)) from error
            raise

    def _waited_for_failure(self) -> bool:
        """Whether the group has failed. It may be noticed only after the error that it caused."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._failure is not None

    def note(self, rank: int, step_id: int, digest: int) -> None:
        """Compare a rank's digest of a step with those of the others. Any thread may call it."""
        if (fault := self._digests.note(rank, step_id, digest)) is not None:
            self._fail(fault)

    def shutdown(self) -> None:
        """Let the ranks finish and exit, kill those that do not, and remove the folder."""
        self._stopping.set()
        self._watcher.join()
        if self._failure is None:
            self.send(Stop())
            deadline = time.monotonic() + _STOP_SECONDS
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass
        self._end()

    # --- the watching thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            if self._answers.poll(_POLL_MS):
                self._take(answer_decoder.decode(self._answers.recv()))
            self._look_at_processes()
        if self._failure is not None and not self._stopping.wait(_GRACE_SECONDS):
            self._on_hang(self._failure)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, RankFault):
            # A rank whose collective failed may report it before the end of its cause is seen.
            time.sleep(_CAUSE_SECONDS)
            for rank, process in enumerate(self._processes, 1):
                if (status := process.poll()) is not None and status < 0:
                    self._fail(f"tensor-parallel rank {rank} {describe_exit(status)}")
            self._fail(answer.message)
        elif isinstance(answer, DrafterLoaded):
            if self.on_drafter is not None:
                self.on_drafter(answer)
        else:
            self.note(answer.rank, answer.step_id, answer.digest)

    def _look_at_processes(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            status = process.poll()
            if status is None or self._failure is not None:
                continue
            while self._failure is None and self._answers.poll(int(1e3 * _LAST_WORDS_SECONDS)):
                self._take(answer_decoder.decode(self._answers.recv()))
            self._fail(f"tensor-parallel rank {rank} {describe_exit(status)}")

    def _fail(self, sentence: str) -> None:
        if self._failure is None:
            self._failure = sentence

    # --- life -------------------------------------------------------------------------------------

    def _bind(self, name: str, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)  # unlimited queue: a step never waits for a slow rank
        socket.set(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def devices_from(rank: int, size: int) -> str:
    """The visible GPUs, beginning with that of a rank, which is then the first of its process."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(size)] if stated is None else stated.split(",")
    return ",".join([*devices[rank:], *devices[:rank]])


class RankEnd:
    """The other ranks' end of the sockets."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._commands = self._context.socket(zmq.PULL)
        self._answers = self._context.socket(zmq.PUSH)
        for socket, name in ((self._commands, f"rank{rank}"), (self._answers, "answers")):
            socket.set(zmq.LINGER, int(1e3 * _STOP_SECONDS))
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.connect(f"{endpoint}/{name}")

    def receive(self, timeout: float | None) -> bytes | None:
        """The next command; None after `timeout` seconds without one."""
        if not self._commands.poll(None if timeout is None else int(1e3 * timeout)):
            return None
        return self._commands.recv()

    def answer(self, answer: Answer) -> None:
        """Send an answer. Never waits."""
        self._answers.send(encoder.encode(answer))

    def close(self) -> None:
        """Send what is queued, for at most two seconds, then close the sockets."""
        self._commands.close()
        self._answers.close()
        self._context.term()
