"""The processes that compile grammars and match tokens: one per grammar, forked from a nursery.

The nursery (`main`) loads the library and the vocabulary, has one thread, and only forks and kills.
A forked process compiles one grammar and then fills masks for every request that uses it. If a
client's grammar makes the library crash, hang or exhaust memory, only that process ends; the
worker, which holds all requests, never runs the library.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, NoReturn

import msgspec
import numpy as np

from ..errors import first_line
from ..messages import GrammarSpec
from ..process import follow_parent
from .compiler import Compiler, XGrammarMatcher
from .grammar import fill_lines

MAX_MEMORY_BYTES = 2 << 30  # address space of a grammar's process beyond the nursery's
STACK_BYTES = 64 << 20  # stack of the compiling thread, in which the library recurses
_LESS_PRIORITY = 5  # niceness of a compilation: on a busy core the engine gets three times as much
_LEAST_PRIORITY = 15  # niceness of one that takes long, so that it does not delay others
_LONG_SECONDS = 1.0
_TOGETHER_NS = 2_000_000  # answers that took less than this in total are sent together
_OOM_SCORE = 800  # of 1000: when out of memory, the kernel kills these processes before the worker

COMMAND = struct.Struct("<cq")  # START (with a descriptor) or KILL, and the number of a process
START, KILL, READY = b"s", b"k", b"r"
LENGTH = struct.Struct("<I")  # precedes every msgpack message
# A row's answer: drafts cut (or FAILED), lines (or bytes of error text) that follow, microseconds.
ROW = struct.Struct("<iII")
FAILED = -1


class Vocabulary(msgspec.Struct, frozen=True):
    """The nursery's start-up arguments; see `build_grammar_backend`."""

    tokens: list[bytes]  # tokens that are text are in UTF-8
    vocab_type: str
    eos_ids: list[int]
    vocab_size: int


class Compiled(msgspec.Struct, array_like=True, frozen=True):
    pid: int  # 0 if no process could be started for it
    error: str = ""  # why the grammar is invalid, or why no process could be started
    num_bytes: int = 0  # size of the compiled grammar


class RowJob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request's part of a step: how its position moves, and the drafts to fill masks for."""

    matcher_id: int  # an unknown id creates a matcher at the grammar's start
    num_rolled_back: int  # tokens to undo first
    accepted: list[int]  # tokens to accept after that
    draft_ids: list[int]


class StepJob(msgspec.Struct, array_like=True, frozen=True):
    """A step's request for masks: the rows of one grammar, answered in this order.

    `dropped` lists the ids of matchers that can be freed.
    """

    rows: list[RowJob]
    dropped: list[int]


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message, preceded by its length."""
    text = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(text)) + text


def read_message(sock: socket.socket) -> bytes:
    """Read the next message. Raises EOFError if the other side is gone."""
    (length,) = LENGTH.unpack(read_exactly(sock, LENGTH.size))
    return read_exactly(sock, length)


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises EOFError if the other side is gone."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def is_readable(sock: socket.socket, seconds: float = 0.0) -> bool:
    """True once a socket has bytes to read or its other side is gone, False after `seconds`.

    ValueError if it is closed.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


# --- the nursery ------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the nursery until the worker is gone.

    The command line has two file descriptors, of the control socket and of the packed `Vocabulary`,
    and the parent's process id. Sends READY when it can fork.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the worker decides when it ends
    control_fd, vocabulary_fd, parent = map(int, sys.argv[1:4])
    follow_parent()
    if os.getppid() != parent:  # the parent died before `follow_parent`
        os._exit(1)
    control = socket.socket(fileno=control_fd)
    with open(vocabulary_fd, "rb") as file:
        words = msgspec.msgpack.decode(file.read(), type=Vocabulary)
    compiler = Compiler(words.tokens, words.vocab_type, words.eos_ids, words.vocab_size)
    compiler.warm()
    del words
    gc.collect()
    gc.freeze()  # the collector no longer touches these pages, so forked processes share them
    _wait_for_one_thread()
    control.sendall(READY)
    Nursery(control, compiler).run()
    os._exit(0)


def _wait_for_one_thread() -> None:
    """Wait for the library's compiling threads to end, since forking needs a single thread."""
    for _ in range(200):
        try:
            if len(os.listdir("/proc/self/task")) == 1:
                return
        except OSError:
            return
        time.sleep(0.005)


class Nursery:
    """Forks a process for each grammar, and kills it on request."""

    def __init__(self, control: socket.socket, compiler: Compiler) -> None:
        self._control = control
        self._compiler = compiler
        self._pids: dict[int, int] = {}  # number -> pid

    def run(self) -> None:
        """Carry out the worker's commands until it is gone, then kill all processes."""
        while True:
            command, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
            if len(command) < COMMAND.size:
                break
            kind, number = COMMAND.unpack(command)
            if kind == START:
                self._start(number, socket.socket(fileno=fds[0]))
            else:
                self._kill(number)
            self._reap()
        for number in list(self._pids):
            self._kill(number)

    def _start(self, number: int, sock: socket.socket) -> None:
        with sock:
            nursery = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                sock.sendall(pack(Compiled(0, f"no process can be started: {error.strerror}")))
                return
            if pid:
                self._pids[number] = pid
                return
            try:
                self._control.close()
                follow_parent()
                if os.getppid() == nursery:
                    live(sock, self._compiler)
            finally:
                os._exit(0)

    def _kill(self, number: int) -> None:
        pid = self._pids.pop(number, None)
        if pid is not None:  # not reaped yet, so the system has not reused the id
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[number]


# --- the process of one grammar ---------------------------------------------------------------


def live(sock: socket.socket, compiler: Compiler) -> None:
    """Be the process of one grammar: compile it, then fill masks until the worker hangs up.

    `sock` brings a `GrammarSpec` first and a `StepJob` for each step after it.
    """
    _limit()
    try:
        spec = msgspec.msgpack.decode(read_message(sock), type=GrammarSpec)
        compiled, answer = _compile_aside(compiler, spec)
        sock.sendall(pack(answer))
        if not answer.error:
            matching = Matching(compiler, compiled)
            while True:
                job = msgspec.msgpack.decode(read_message(sock), type=StepJob)
                matching.answer(job, sock)
    except (EOFError, OSError):
        return


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        most = used + MAX_MEMORY_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(str(_OOM_SCORE))
    except OSError:
        pass  # not Linux, or not permitted; these limits are only a second line of defence


def _compile_aside(compiler: Compiler, spec: GrammarSpec) -> tuple[Any, Compiled]:
    """Compile on a new thread, which has a large stack and a lower priority than masks."""
    compiled: Any = None
    answer = Compiled(os.getpid(), "the compiler failed")

    def work() -> None:
        nonlocal compiled, answer
        lower_priority(_LESS_PRIORITY)
        try:
            compiled = compiler.compile(spec)
            compiler.check_first_mask(compiled)
            answer = Compiled(os.getpid(), "", int(compiled.memory_size_bytes()))
        except MemoryError:
            answer = Compiled(os.getpid(), "compiling it takes too much memory")
        except Exception as error:
            answer = Compiled(os.getpid(), first_line(error) or type(error).__name__)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONG_SECONDS)
    if thread.is_alive() and thread.native_id is not None:
        lower_priority(_LEAST_PRIORITY - _LESS_PRIORITY, thread.native_id)
    thread.join()
    return compiled, answer


def lower_priority(less: int, thread: int = 0) -> None:
    """On Linux, add `less` to the niceness of a thread (0: the current thread)."""
    if sys.platform == "linux":
        thread = thread or threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + less
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice))


class Matching:
    """Keeps a matcher for each request that uses this grammar."""

    def __init__(self, compiler: Compiler, compiled: Any) -> None:
        self._compiler = compiler
        self._compiled = compiled
        self._matchers: dict[int, XGrammarMatcher] = {}

    def answer(self, job: StepJob, sock: socket.socket) -> None:
        """Compute the answer of each row and send them in order.

        Answers that are computed quickly are sent together, but none waits for a slow row after it.
        So the first answer that is missing shows the worker which row is slow. If a row fails, its
        answer is the error, and the rows after it are answered as well.
        """
        for matcher_id in job.dropped:
            self._matchers.pop(matcher_id, None)
        answers: list[bytes] = []
        began = sent = time.thread_time_ns()
        for row in job.rows:
            try:
                num_cut, lines = self._fill(row)
                body, count = lines.tobytes(), len(lines)
            except Exception as error:
                body = (first_line(error) or type(error).__name__).encode("utf-8", "replace")
                num_cut, count = FAILED, len(body)
            now = time.thread_time_ns()
            answers += (ROW.pack(num_cut, count, min((now - began) // 1000, 0xFFFFFFFF)), body)
            began = now
            if now - sent > _TOGETHER_NS:
                sock.sendall(b"".join(answers))
                answers, sent = [], now
        if answers:
            sock.sendall(b"".join(answers))

    def _fill(self, row: RowJob) -> tuple[int, np.ndarray]:
        """Return how many drafts violate the grammar or follow one that does, and the mask lines of
        the others, [up to drafts + 1, ceil(V / 32)] int32."""
        matcher = self._matchers.get(row.matcher_id)
        if matcher is None:
            matcher = self._matchers[row.matcher_id] = self._compiler.matcher(self._compiled)
        if row.num_rolled_back:
            matcher.rollback(row.num_rolled_back)
        for token_id in row.accepted:
            if not matcher.accept(token_id):
                raise ValueError(f"token {token_id} violates the grammar")
        lines = np.empty((len(row.draft_ids) + 1, self._compiler.line_length), dtype=np.int32)
        num_filled, num_cut = fill_lines(matcher, row.draft_ids, lines)
        return num_cut, lines[:num_filled]


if __name__ == "__main__":
    main()
