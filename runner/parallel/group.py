"""The first rank's side of a group: has the other ranks started, tells them what to run.

A rank that dies, or whose tokens differ, ends the group: `check` raises one sentence, and if the
main thread hangs in a collective that will never end, the process ends itself. The server then
starts a new worker, and with it a new group.

A GPU whose sum waits for a rank that is gone waits until its process ends, because no call stops a
running kernel. So a group never asks such ranks to stop: SIGKILL and `os._exit` do not wait for the
device, and the driver ends a dead process's kernels.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import zmq

from ...configs.schema import Config
from ..errors import RunnerError
from ..group_key import connect, listen
from ..messages import StartRanks
from ..pair import check_descriptors
from ..process import EngineOrders, Hosted, WorkerOrders, describe_exit
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
from .rank_processes import (
    Host,
    HostedRanks,
    LocalRanks,
    RankProcesses,
    Rendezvous,
    open_rendezvous,
)

logger = logging.getLogger(__name__)

_POLL_MS = 50  # how often processes are looked at
_LAST_WORDS_SECONDS = 0.5  # time for the sentence of a rank that has ended
_CAUSE_SECONDS = 0.1
_NOTICE_SECONDS = 1.5  # for the watching thread to see a rank's end after a collective has failed
_GRACE_SECONDS = 2.0  # for the main thread to report the end of the group itself
_STOP_SECONDS = 2.0  # at shutdown, for the ranks to exit
_MAX_BYTES = 256 << 20  # of a message between hosts; masks of large batches take tens of megabytes


class RankFailed(RunnerError):
    """A rank has ended or computed something else, so that the group cannot go on."""


class RankGroup:
    """The ranks 1, 2 ... of a group, used by rank 0."""

    on_drafter: Callable[[DrafterLoaded], None] | None = None  # called in a thread

    def __init__(
        self,
        config: Config,
        on_hang: Callable[[str], None],
        hosted: Hosted | None = None,
        tell: Callable[[StartRanks], None] | None = None,
        engines: EngineOrders | None = None,
        meeting: Rendezvous | None = None,
    ) -> None:
        """Start the processes. `on_hang` is called in a thread if the group has failed and the
        main thread has not reported it within two seconds.

        For a group on several hosts, `hosted` says where this one listens, and `tell` sends a
        message to the server, which then starts the other ranks. `engines`: the place of this one
        among engines that share the experts, whose ranks all meet at `meeting`. Raises OSError.
        """
        self.size = config.parallel.tensor_parallel_size
        self.on_hang = on_hang
        self._hosted = hosted
        self._folder = tempfile.mkdtemp(prefix="slipstream-ranks-")  # mode 0700
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._digests = Digests(self.size)
        check_descriptors()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._commands: list[zmq.Socket[bytes]] = []
        self._processes: RankProcesses
        # Of this process, for the collectives of a group on several hosts.
        self.host: Host | None = None
        if hosted is None:
            self._processes = LocalRanks(config, engines)
        else:
            assert tell is not None, "the server starts the ranks of other hosts"
            self._processes = HostedRanks(tell)
        try:
            meeting = meeting or self._choose_meeting()
            self.rendezvous, self.host = meeting.where, meeting.host
            self._answers, answers = self._bind("answers", zmq.PULL)
            endpoints = []
            for rank in range(1, self.size):
                commands, endpoint = self._bind(f"rank{rank}", zmq.PUSH)
                self._commands.append(commands)
                endpoints.append(endpoint)
            self._processes.start(StartRanks(self.rendezvous, answers, endpoints))
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def send(self, command: Command) -> None:
        """Send a command to every other rank. Waits only for ranks that have not connected."""
        packet = encoder.encode(command)
        for commands in self._commands:
            commands.send(packet)

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
            for commands in self._commands:
                with suppress(zmq.Again):  # a rank that is gone; `send` would wait for ever
                    commands.send(encoder.encode(Stop()), zmq.NOBLOCK)
            self._processes.wait(_STOP_SECONDS)
        self._end()

    def abandon(self) -> None:
        """Kill the ranks and remove the folder."""
        self._stopping.set()
        self._watcher.join()
        self._end()

    # --- the watching thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.is_set() and self._failure is None:
            if self._answers.poll(_POLL_MS):
                self._take(answer_decoder.decode(self._answers.recv()))
            self._look_at_processes()
        if self._failure is not None and not self._stopping.wait(_GRACE_SECONDS):
            self.on_hang(self._failure)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, RankFault):
            # A rank whose collective failed may report it before the end of its cause is seen.
            time.sleep(_CAUSE_SECONDS)
            for rank, status in self._processes.ended():
                if status < 0:
                    self._fail(f"tensor-parallel rank {rank} {describe_exit(status)}")
            self._fail(answer.message)
        elif isinstance(answer, DrafterLoaded):
            if self.on_drafter is not None:
                self.on_drafter(answer)
        else:
            self.note(answer.rank, answer.step_id, answer.digest)

    def _look_at_processes(self) -> None:
        for rank, status in self._processes.ended():
            while self._failure is None and self._answers.poll(int(1e3 * _LAST_WORDS_SECONDS)):
                self._take(answer_decoder.decode(self._answers.recv()))
            self._fail(f"tensor-parallel rank {rank} {describe_exit(status)}")

    def _fail(self, sentence: str) -> None:
        if self._failure is None:
            self._failure = sentence

    # --- life -------------------------------------------------------------------------------------

    def _choose_meeting(self) -> Rendezvous:
        if self._hosted is None:
            return Rendezvous(f"{self._folder}/group")
        return open_rendezvous(self._hosted)

    def _bind(self, name: str, kind: int) -> tuple[zmq.Socket[bytes], str]:
        """A socket that listens, and its endpoint."""
        bound = self._context.socket(kind)
        bound.set(zmq.SNDHWM, 0)  # unlimited queue: a step never waits for a slow rank
        bound.set(zmq.RCVHWM, 0)
        if self._hosted is None:
            bound.bind(f"ipc://{self._folder}/{name}")
            return bound, f"ipc://{self._folder}/{name}"
        bound.set(zmq.MAXMSGSIZE, _MAX_BYTES)
        return bound, listen(bound, self._hosted.address, self._hosted.key)

    def _end(self) -> None:
        self._processes.kill()
        if self.host is not None and self.host.listener is not None:
            self.host.listener.close()
        # On several hosts, the command to stop may still be on its way.
        linger = 0.0 if self._hosted is None or self._failure is not None else _STOP_SECONDS
        self._context.destroy(linger=int(1e3 * linger))
        shutil.rmtree(self._folder, ignore_errors=True)


class RankEnd:
    """The other ranks' end of the sockets."""

    def __init__(self, orders: WorkerOrders) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._commands = self._context.socket(zmq.PULL)
        self._answers = self._context.socket(zmq.PUSH)
        ends = ((self._commands, orders.endpoint), (self._answers, orders.answers))
        for end, endpoint in ends:
            end.set(zmq.LINGER, int(1e3 * _STOP_SECONDS))
            end.set(zmq.SNDHWM, 0)
            end.set(zmq.RCVHWM, 0)
            if orders.hosted is None:
                end.connect(endpoint)
            else:
                end.set(zmq.MAXMSGSIZE, _MAX_BYTES)
                connect(end, endpoint, orders.hosted.key)

    def receive(self, timeout: float | None) -> bytes | None:
        """The next command; None after `timeout` seconds without one."""
        if not self._commands.poll(None if timeout is None else int(1e3 * timeout)):
            return None
        return self._commands.recv()

    def answer(self, answer: Answer) -> None:
        self._answers.send(encoder.encode(answer))

    def close(self) -> None:
        """Send what is queued, for at most two seconds, then close the sockets."""
        self._commands.close()
        self._answers.close()
        self._context.term()
