"""The worker's side of a grammar's process, and of each request's position in the grammar.

A step costs one message each way per grammar. If a mask takes longer than other requests can wait,
the process is killed and the requests that use this grammar end.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from ..messages import GrammarSpec
from .grammar import TOO_SLOW, GrammarMatcher, GrammarTooSlow, MaskJob, is_allowed
from .process import FAILED, ROW, Compiled, RowJob, StepJob, is_readable, pack

MAX_STALL_SECONDS = 0.12  # a step waits this long for masks before slow processes are killed
# Processor time that a process may use in one step: STEP_SECONDS, plus MAX_LINE_SECONDS per mask
# line. The first mask of a state is not cached yet and may take ten times as long as later ones.
STEP_SECONDS = 0.1
MAX_LINE_SECONDS = 0.01
# The processes of a step share the cores. Once they have together used TOGETHER_SECONDS of each
# core, those that used more than FAIR_SECONDS are killed, so that many slow ones do not add up.
TOGETHER_SECONDS = 0.12
FAIR_SECONDS = 0.01  # per step; the masks of ordinary grammars take one or two milliseconds
MAX_SILENT_SECONDS = 5.0  # time limit for a process that gets no time on a core
# Time that all masks of a request may take: BURST_SECONDS, plus STEADY_LINE_SECONDS per line.
BURST_SECONDS = 1.0
STEADY_LINE_SECONDS = 0.015
_TICK_SECONDS = 0.005  # the socket's time-out, after which limits are checked


class GrammarProcess:
    """The worker's handle of the process that compiles one grammar and fills its masks.

    One thread at a time may use it, but `drop` may be called from any. After a fault, or if the
    process is too slow, the handle calls `end(self)`, the pool's function that kills the process.
    """

    def __init__(self, spec: GrammarSpec, number: int, end: Callable[[GrammarProcess], None]):
        self.spec = spec
        self.number = number
        self.waiting: list[Future[GrammarMatcher]] = []
        self.is_ready = False  # the grammar is compiled
        self.is_over = False
        self.is_too_slow = False  # killed because its masks took too long
        self.num_bytes = 0  # size of the compiled grammar
        self.sock: socket.socket | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self._end = end
        self.pid = 0
        self._num_matchers = 0
        self._num_dropped = 0
        self._dropped: deque[int] = deque()  # filled by whichever thread collects garbage
        self._buffer = bytearray()

    @property
    def is_idle(self) -> bool:
        """True if the grammar is compiled and no request uses it."""
        return self.is_ready and self._num_matchers == self._num_dropped + len(self._dropped)

    @property
    def is_dead(self) -> bool:
        """True if the process ended unexpectedly after it had compiled the grammar."""
        if not self.is_ready or self.sock is None:
            return False
        return is_readable(self.sock)  # between steps it sends nothing, so this is the end of file

    def serve(self, sock: socket.socket, compiled: Compiled) -> None:
        """Note that the grammar is compiled and its process answers on this socket."""
        self.pid, self.num_bytes = compiled.pid, compiled.num_bytes
        sock.settimeout(_TICK_SECONDS)
        self.is_ready = True

    def matcher(self, vocab_size: int) -> RemoteMatcher:
        self._num_matchers += 1
        return RemoteMatcher(self, self._num_matchers, vocab_size)

    def drop(self, matcher_id: int) -> None:
        """Note that a matcher was freed; the next `ask` reports it to the process."""
        self._dropped.append(matcher_id)

    def ask(self, jobs: Sequence[MaskJob]) -> None:
        """Send a step's jobs to the process; `take` reads the answers."""
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        self._num_dropped += len(dropped)
        rows = [matcher_of(job).take_row(job.draft_ids) for job in jobs]
        if self.sock is not None and not self.is_over:
            try:
                self.sock.sendall(pack(StepJob(rows, dropped)))
            except OSError:
                self._end(self)  # `take` notices

    def take(self, jobs: Sequence[MaskJob], step: StepClock) -> None:
        """Wait for the answers to `ask`, and fill each job's `lines` and `num_cut`, or its `error`.

        If the process is gone, silent or too slow, it is killed, and that job and those after it
        get the error.
        """
        self._buffer.clear()
        num_lines = 0
        for index, job in enumerate(jobs):
            num_lines += len(job.lines)
            try:
                self._take_row(job, step, STEP_SECONDS + num_lines * MAX_LINE_SECONDS)
            except (OSError, GrammarTooSlow) as error:
                error = error.with_traceback(None)  # its frames would keep jobs and matchers alive
                for rest in jobs[index:]:
                    rest.error = error
                self._end(self)
                return

    def _take_row(self, job: MaskJob, step: StepClock, most: float) -> None:
        num_cut, count, spent = ROW.unpack(self._read(ROW.size, step, most))
        if num_cut == FAILED:
            job.error = RuntimeError(self._read(count, step, most).decode())
            return
        data = self._read(count * job.lines.itemsize * job.lines.shape[1], step, most)
        job.lines[:count] = np.frombuffer(data, job.lines.dtype).reshape(count, -1)
        job.lines[count:] = job.lines[count - 1]
        job.num_cut = num_cut
        if not matcher_of(job).take_lines(job.draft_ids, job.lines[:count], spent / 1e6):
            job.error = GrammarTooSlow(TOO_SLOW)

    def _read(self, size: int, step: StepClock, most: float) -> bytes:
        """Read `size` bytes. OSError if the process is gone or silent, GrammarTooSlow if too
        slow."""
        while len(self._buffer) < size:
            try:
                if self.is_too_slow:
                    raise GrammarTooSlow(TOO_SLOW)
                if self.sock is None or self.is_over:
                    part = b""
                elif step.is_late and not is_readable(self.sock):
                    raise TimeoutError  # the step is late already: check the limits at once
                else:
                    part = self.sock.recv(1 << 18)
            except TimeoutError:
                self._check_time(step, most)
                if step.is_late and not self.is_over and self.sock is not None:
                    is_readable(self.sock, _TICK_SECONDS)
                continue
            except OSError:
                part = b""
            if not part:
                raise OSError("its process has ended")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def end_if_silent(self) -> None:
        """Kill the process for being slow, unless it has begun to answer."""
        if self.sock is not None and not self.is_over and not is_readable(self.sock):
            self.is_too_slow = True
            self._end(self)

    def _check_time(self, step: StepClock, most: float) -> None:
        """Raise an error if the process has computed or been silent for too long.

        GrammarTooSlow is judged by processor time, because on a busy machine other processes may
        have used the elapsed time.
        """
        if not step.is_late:
            return
        spent = step.spent(self)
        if spent > most:
            raise GrammarTooSlow(TOO_SLOW)
        if step.is_too_much:
            step.end_slow_ones()
        if step.elapsed > MAX_SILENT_SECONDS:
            raise OSError("its process does not answer")


class RemoteMatcher:
    """One request's position in a grammar; see `GrammarMatcher`.

    Tokens are accepted or refused by the mask lines that arrived last. The process learns which
    tokens were accepted with the next request for masks.
    """

    def __init__(self, process: GrammarProcess, matcher_id: int, vocab_size: int) -> None:
        self.process = process
        self._id = matcher_id
        self._vocab_size = vocab_size
        self.is_terminated = False
        self._num_rolled_back = 0  # tokens to undo, not yet reported to the process
        self._accepted: list[int] = []  # tokens accepted after that, not yet reported
        # [n, ceil(V / 32)] masks from the present position on, along the drafts
        self._lines: np.ndarray | None = None
        self._draft_ids: Sequence[int] = ()
        self._seconds, self._num_lines = 0.0, 0  # totals over all masks so far

    def __del__(self) -> None:
        self.process.drop(self._id)

    @property
    def ends_with_text(self) -> bool:
        return not self.process.eos_ids

    def accept(self, token_id: int) -> bool:
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"{token_id} is not a valid token id")
        if self.is_terminated:
            return False
        if self._lines is None:
            self.fill(np.empty(-(-self._vocab_size // 32), dtype=np.int32))
        assert self._lines is not None
        if not is_allowed(self._lines[0], token_id):
            return False
        self._accepted.append(token_id)
        is_next = len(self._lines) > 1 and self._draft_ids[0] == token_id
        self._lines = self._lines[1:] if is_next else None
        self._draft_ids = self._draft_ids[1:] if is_next else ()
        if not self.ends_with_text:
            self.is_terminated = token_id in self.process.eos_ids
            return True
        if self._lines is None:
            self.fill(np.empty(-(-self._vocab_size // 32), dtype=np.int32))
        assert self._lines is not None
        self.is_terminated = not self._lines[0].any()
        return True

    def rollback(self, num_tokens: int) -> None:
        num_unsent = min(num_tokens, len(self._accepted))
        del self._accepted[len(self._accepted) - num_unsent :]
        self._num_rolled_back += num_tokens - num_unsent
        self.is_terminated = False
        self._lines, self._draft_ids = None, ()

    def fill(self, line: np.ndarray) -> None:
        job = MaskJob(self, (), line.reshape(1, -1))
        fill_remote([job])
        if job.error is not None:
            raise job.error

    def take_row(self, draft_ids: Sequence[int]) -> RowJob:
        """The message that requests the masks of these drafts.

        It also reports the tokens accepted and undone since the last message.
        """
        row = RowJob(self._id, self._num_rolled_back, self._accepted, list(draft_ids))
        self._num_rolled_back, self._accepted = 0, []
        self._lines = None
        return row

    def take_lines(self, draft_ids: Sequence[int], lines: np.ndarray, seconds: float) -> bool:
        """Keep the mask lines of an answer; False if the request's masks took too long in total."""
        self._lines, self._draft_ids = lines, draft_ids
        self._seconds += seconds
        self._num_lines += len(lines)
        return self._seconds <= BURST_SECONDS + STEADY_LINE_SECONDS * self._num_lines


class StepClock:
    """Measures how long a step has waited for masks and how long their processes have computed."""

    def __init__(self, processes: Iterable[GrammarProcess]) -> None:
        self._began = time.monotonic()
        self._cpu_began = {process: cpu_seconds(process.pid) for process in processes}
        self._spent = dict.fromkeys(self._cpu_began, 0.0)
        self.answered: set[GrammarProcess] = set()

    @property
    def elapsed(self) -> float:
        """Seconds since the masks were requested."""
        return time.monotonic() - self._began

    @property
    def is_late(self) -> bool:
        """True once the step has waited longer than MAX_STALL_SECONDS for its masks."""
        return self.elapsed > MAX_STALL_SECONDS

    @property
    def is_too_much(self) -> bool:
        """True once all processes together have used more processor time than a step may cost.

        The limit is TOGETHER_SECONDS for each core.
        """
        return sum(map(self.spent, self._spent)) > TOGETHER_SECONDS * num_cores()

    def spent(self, process: GrammarProcess) -> float:
        """The processor time in seconds that a process has used in this step.

        After its end this stays the last known value.
        """
        now = cpu_seconds(process.pid)
        spent = max(self._spent[process], now - self._cpu_began[process])
        self._spent[process] = spent
        return spent

    def end_slow_ones(self) -> None:
        """Kill every process that has used more than FAIR_SECONDS and has not answered yet."""
        for process in self._spent:
            if self.spent(process) > FAIR_SECONDS and process not in self.answered:
                process.end_if_silent()


def matcher_of(job: MaskJob) -> RemoteMatcher:
    """Return the job's matcher, which must be one of `GrammarProcess.matcher`."""
    assert isinstance(job.matcher, RemoteMatcher)
    return job.matcher


def fill_remote(jobs: Sequence[MaskJob]) -> None:
    """Fill the masks of a step. The grammars' processes work in parallel.

    A failed job has its `error` set; it does not make this function raise.
    """
    parts: dict[GrammarProcess, list[MaskJob]] = {}
    for job in jobs:
        parts.setdefault(matcher_of(job).process, []).append(job)
    step = StepClock(parts)
    for process, part in parts.items():
        process.ask(part)
    for process, part in parts.items():
        process.take(part, step)
        step.answered.add(process)


@functools.cache
def num_cores() -> int:
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def cpu_seconds(pid: int) -> float:
    """Seconds of processor time that a process has used; 0 if it has ended.

    Only Linux can report it; elsewhere the elapsed time stands in for it.
    """
    if sys.platform != "linux":
        return time.monotonic()
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's id of that process's CPU clock
    except OSError:
        return 0.0  # the process has ended
