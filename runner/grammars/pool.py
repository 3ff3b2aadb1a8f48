"""Runs grammars in processes: one process per grammar, reused while the grammar is in use.

The pool owns the nursery that they are forked from (see `process`) and decides which ones live.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from ..messages import GrammarSpec
from ..process import describe_exit
from .grammar import GrammarMatcher, MaskJob
from .process import (
    COMMAND,
    KILL,
    READY,
    START,
    Compiled,
    Vocabulary,
    is_readable,
    pack,
    read_message,
)
from .remote import GrammarProcess, fill_remote

logger = logging.getLogger(__name__)

MAX_COMPILE_SECONDS = 30.0
MAX_COMPILING = 16  # grammars compiled at once; slow ones run at a lower priority
MAX_PROCESSES = 128
MAX_IDLE = 16  # processes kept although no request uses their grammar
MAX_IDLE_BYTES = 512 << 20  # most memory of their compiled grammars
_START_SECONDS = 120.0  # time limit for starting the nursery, even from a slow disk
_STOP_SECONDS = 1.0
_ENDED = "the server is shutting down"
_JSON_OBJECT = ("json_object", "")  # compiled at the start and kept, so that it never has to wait


def build_grammar_backend(
    vocab: Sequence[bytes | str],
    vocab_type: str,
    eos_ids: Sequence[int],
    vocab_size: int,
) -> GrammarPool:
    """Create a pool for a vocabulary in id order, without blocking. Control tokens are b"".

    `vocab_type` says how tokens are written: "raw" (they are the bytes), "byte_fallback" (<0x0A>
    and a metaspace, as in sentencepiece) or "byte_level" (GPT-2's alphabet). `vocab_size` is the
    width of the logits, which may be padded beyond the vocabulary.
    """
    assert vocab_type in ("raw", "byte_fallback", "byte_level")
    tokens = [piece.encode() if isinstance(piece, str) else piece for piece in vocab[:vocab_size]]
    stops = [index for index in eos_ids if 0 <= index < vocab_size]  # others are never chosen
    return GrammarPool(Vocabulary(tokens, vocab_type, stops, vocab_size))


class GrammarPool:
    """Compiles each grammar in its own process, which is killed when no request waits for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._lock = threading.RLock()
        self._processes: dict[tuple[str, str], GrammarProcess] = {}  # least recently used first
        self._numbers = itertools.count()
        self._nursery: Future[Nursery] | None = None
        # The kernel kills a child when the thread that started it ends, so one thread starts them
        # all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grammar-nursery")
        self._pool = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="grammar")

    def prepare(self) -> None:
        """Start preparing what the first grammar needs, without blocking."""
        self.compile(GrammarSpec("json_object"))

    def compile(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """Start compiling; the future yields a matcher at the grammar's start, or raises ValueError
        if the grammar is invalid."""
        future: Future[GrammarMatcher] = Future()
        with self._lock:
            process = self._find(spec)
            if process.is_ready:
                future.set_result(process.matcher(self._vocabulary.vocab_size))
                return future
            process.waiting.append(future)
        # Not a closure over the future, whose reference cycle would keep the matcher until a
        # collection.
        future.add_done_callback(functools.partial(self._leave, process))
        return future

    def fill(self, jobs: Sequence[MaskJob]) -> None:
        """Fill the masks of a step. A fault in a grammar is stored in its job's `error`."""
        fill_remote(jobs)

    def shutdown(self) -> None:
        with self._lock:
            for process in list(self._processes.values()):
                self._end(process)
            nursery, self._nursery = self._nursery, None
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._starter.shutdown(wait=False, cancel_futures=True)
        if nursery is not None:
            nursery.add_done_callback(_stop_nursery)

    # --- one grammar's life -----------------------------------------------------------------------

    def _find(self, spec: GrammarSpec) -> GrammarProcess:
        """Find or start the process of a grammar, and mark it as the most recently used."""
        key = (spec.kind, spec.value)
        process = self._processes.pop(key, None)
        if process is not None and process.is_dead:
            self._end(process)
        if process is None or process.is_over:
            process = GrammarProcess(spec, next(self._numbers), self._end)
            process.eos_ids = self._eos_ids
            pool = self._pool if key != _JSON_OBJECT else self._starter
            nursery = self._live_nursery()
            pool.submit(self._bring_up, process, nursery)
        self._processes[key] = process
        return process

    def _bring_up(self, process: GrammarProcess, nursery: Future[Nursery]) -> None:
        """On a thread of the pool, start a process, wait for its compilation and set the
        futures."""
        error: Exception | None = None
        try:
            self._wait_for_room(process)
            compiled = self._compiled(process, nursery.result())
            if compiled.error:
                error = (ValueError if compiled.pid else RuntimeError)(compiled.error)
        except Exception as raised:
            error = raised
        with self._lock:
            if error is None and not process.is_over and process.sock is not None:
                process.serve(process.sock, compiled)
            else:
                self._end(process)
            waiting, process.waiting = process.waiting, []
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if process.is_ready:
                future.set_result(process.matcher(self._vocabulary.vocab_size))
            else:
                future.set_exception(error or RuntimeError(_ENDED))

    def _compiled(self, process: GrammarProcess, nursery: Nursery) -> Compiled:
        """Start a process and return its answer. Raises ValueError if the grammar crashed it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            process.sock = ours
            if process.is_over:
                raise RuntimeError(_ENDED)
            nursery.start(process.number, theirs)
        ours.settimeout(MAX_COMPILE_SECONDS)
        try:
            ours.sendall(pack(process.spec))
            return msgspec.msgpack.decode(read_message(ours), type=Compiled)
        except TimeoutError:
            seconds = f"{MAX_COMPILE_SECONDS:.0f} s"
            raise ValueError(f"it takes longer than {seconds} to compile") from None
        except (EOFError, OSError):
            # Blame the grammar only if nothing else ended its process.
            with self._lock:
                if process.is_over:
                    raise RuntimeError(_ENDED) from None
            if not nursery.is_alive:
                raise RuntimeError("the compiler's process has ended") from None
            raise ValueError(
                "it crashed the compiler: it is too large or nested too deep"
            ) from None

    def _leave(self, process: GrammarProcess, future: Future[GrammarMatcher]) -> None:
        """Callback of a future: if it was cancelled and no other waits, end the compilation."""
        with self._lock:
            if not future.cancelled() or process.is_ready or process.is_over:
                return
            if future in process.waiting:
                process.waiting.remove(future)
            if not process.waiting:
                self._end(process)

    def _end(self, process: GrammarProcess) -> None:
        """Kill a process in any state and forget it."""
        with self._lock:
            if process.sock is not None:
                process.sock.close()
                if not process.is_over:
                    self._kill(process.number)
            process.is_over, process.is_ready = True, False
            key = (process.spec.kind, process.spec.value)
            if self._processes.get(key) is process:
                del self._processes[key]

    def _kill(self, number: int) -> None:
        nursery = self._nursery
        if nursery is not None and nursery.done() and nursery.exception() is None:
            nursery.result().kill(number)

    def _wait_for_room(self, process: GrammarProcess) -> None:
        """End surplus idle processes, then wait until there is room or `process` has been ended."""
        while not process.is_over:
            with self._lock:
                others = [other for other in self._processes.values() if other.sock is not None]
                idle = [other for other in others if other.is_idle and not _is_kept(other)]
                num_bytes = sum(other.num_bytes for other in idle)
                while idle and (len(idle) > MAX_IDLE or num_bytes > MAX_IDLE_BYTES
                                or len(others) >= MAX_PROCESSES):  # fmt: skip
                    oldest = idle.pop(0)
                    others.remove(oldest)
                    num_bytes -= oldest.num_bytes
                    self._end(oldest)
                if len(others) < MAX_PROCESSES:
                    return
            time.sleep(0.02)

    # --- the nursery ------------------------------------------------------------------------------

    def _live_nursery(self) -> Future[Nursery]:
        """The nursery; starts it if there is none or it has ended."""
        nursery = self._nursery
        if nursery is not None and nursery.done():
            if nursery.exception() is not None:
                nursery = None
            elif not nursery.result().is_alive:
                logger.error("the grammar compiler's process %s", nursery.result().stop())
                nursery = None
        if nursery is None:
            nursery = self._nursery = self._starter.submit(Nursery, self._vocabulary)
        return nursery


def _is_kept(process: GrammarProcess) -> bool:
    return (process.spec.kind, process.spec.value) == _JSON_OBJECT


def _stop_nursery(nursery: Future[Nursery]) -> None:
    if not nursery.cancelled() and nursery.exception() is None:
        nursery.result().stop()


class Nursery:
    """The process that grammar processes are forked from.

    Creating it blocks until the process has started, and raises RuntimeError if that fails.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        package = __package__ or ""
        root = sys.modules[package.partition(".")[0]].__path__[0]
        paths = [str(Path(root).parent), os.environ.get("PYTHONPATH", "")]
        self._control, theirs = socket.socketpair()
        with theirs, _anonymous_file() as file:
            file.write(msgspec.msgpack.encode(vocabulary))
            file.seek(0)
            fds = (theirs.fileno(), file.fileno())
            # -P keeps the current folder, which may hold a package of an imported name, off
            # sys.path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{package}.process",
                 *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )  # fmt: skip
        self._control.settimeout(_START_SECONDS)
        try:
            is_ready = self._control.recv(1) == READY
        except OSError:
            is_ready = False
        if not is_ready:
            raise RuntimeError(f"the grammar compiler's process {self.stop()}")

    @property
    def is_alive(self) -> bool:
        """True if it can still start processes.

        Its end of the control socket closes before the kernel kills the processes that it started.
        So once a caller sees one of those end because the nursery ended, this is False.
        """
        try:
            return self._process.poll() is None and not is_readable(self._control)
        except ValueError:  # `stop` has closed the socket
            return False

    def start(self, number: int, sock: socket.socket) -> None:
        """Fork a process that serves the socket; `number` identifies it in `kill`."""
        socket.send_fds(self._control, [COMMAND.pack(START, number)], [sock.fileno()])

    def kill(self, number: int) -> None:
        try:
            self._control.sendall(COMMAND.pack(KILL, number))
        except OSError:
            pass  # the nursery and its processes are gone

    def stop(self) -> str:
        """End the nursery and its processes; returns a phrase that says how it ended."""
        self._control.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return describe_exit(self._process.returncode)


def _anonymous_file() -> IO[bytes]:
    """An unnamed temporary file, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("vocabulary"), "w+b")
    return tempfile.TemporaryFile()
