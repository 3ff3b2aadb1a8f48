"""The processes of grammars: they start, end and start again, and nothing of them remains."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.runner.grammars.pool import GrammarPool
from slipstream.runner.grammars.process import Compiled, Nursery, read_message
from slipstream.runner.messages import GrammarSpec

from .pool_probe import (
    LETTERS,
    LONG_SECONDS,
    OBJECT,
    build,
    children,
    eventually,
    job,
    new_child,
    nursery_pid,
    slow_to_compile,
    still_works,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_dead_nursery_is_noticed_and_started_again(pool: GrammarPool) -> None:
    first = nursery_pid(pool)
    matcher = pool.compile(OBJECT).result(LONG_SECONDS)
    forked = children(first)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_running, forked)))
    lost = job(matcher)
    pool.fill([lost])
    assert isinstance(lost.error, OSError)
    assert still_works(pool) and nursery_pid(pool) != first
    assert pool.compile(OBJECT).result(LONG_SECONDS).accept(ord("{"))


def test_idle_processes_are_kept_for_a_while_and_not_without_bound(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runner.grammars.pool.MAX_IDLE", 2)
    used = pool.compile(GrammarSpec("regex", "used")).result(LONG_SECONDS)
    for number in range(8):
        pool.compile(GrammarSpec("regex", f"a{number}")).result(LONG_SECONDS)
    # Besides: the JSON object's, the one in use, and the newest, which was not there to be counted.
    assert eventually(lambda: len(children(nursery_pid(pool))) <= 2 + 3)
    assert pool.compile(GrammarSpec("regex", "a6")).done()  # of the latest
    assert not pool.compile(GrammarSpec("regex", "a0")).done()
    assert used.accept(ord("u")) and pool.compile(OBJECT).done()


def test_the_processes_end_with_the_worker_however_that_ends() -> None:
    script = (
        "import os, signal, sys\n"
        "from slipstream.runner.grammars.pool import build_grammar_backend\n"
        "from slipstream.runner.messages import GrammarSpec\n"
        "assert 'xgrammar' not in sys.modules and 'torch' not in sys.modules\n"
        f"pool = build_grammar_backend({LETTERS!r}, 'raw', [0], 256)\n"
        "pool.compile(GrammarSpec('json_object')).result(60)\n"
        f"pool.compile(GrammarSpec('regex', {slow_to_compile().value!r}))\n"
        "print(pool._nursery.result()._process.pid, flush=True)\n"
        "sys.stdin.read(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        nursery = int(worker.stdout.readline())
        assert eventually(lambda: len(children(nursery)) == 2)
        started = {nursery, *children(nursery)}
        worker.stdin.write(b"x")
        worker.stdin.flush()
        worker.wait(LONG_SECONDS)
    assert eventually(lambda: not any(map(is_running, started)))


def test_nothing_is_left_after_a_shutdown() -> None:
    backend = build()
    future = backend.compile(slow_to_compile())
    nursery = nursery_pid(backend)
    assert eventually(lambda: len(children(nursery)) == 2)
    started = {nursery, *children(nursery)}
    backend.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        future.result(LONG_SECONDS)
    assert eventually(lambda: not any(map(is_running, started)))


def test_a_shutdown_is_not_blamed_on_a_grammar_that_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grammar's process may end before the nursery does."""
    held: list[Any] = []
    monkeypatch.setattr("slipstream.runner.grammars.pool._stop_nursery", held.append)
    backend = build()
    before = children(nursery_pid(backend))
    future = backend.compile(slow_to_compile())
    new_child(backend, before)
    backend.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        future.result(LONG_SECONDS)
    held[0].result().stop()


def test_the_end_of_the_nursery_is_not_blamed_on_a_grammar(pool: GrammarPool) -> None:
    before = children(nursery_pid(pool))
    future = pool.compile(slow_to_compile())
    new_child(pool, before)
    os.kill(nursery_pid(pool), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the compiler's process has ended"):
        future.result(LONG_SECONDS)
    assert still_works(pool)


def test_a_process_that_cannot_be_started_is_not_blamed_on_a_grammar(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    with ours, monkeypatch.context() as patched:
        patched.setattr(os, "fork", fork)
        Nursery(ours, None)._start(1, theirs)  # type: ignore[arg-type]  # it compiles nothing
        answer = msgspec.msgpack.decode(read_message(ours), type=Compiled)
    monkeypatch.setattr(pool, "_compiled", lambda process, nursery: answer)
    with pytest.raises(RuntimeError, match="no process can be started: Resource"):
        pool.compile(GrammarSpec("regex", "new")).result(LONG_SECONDS)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_schemas_are_found_again_by_their_text(pool: GrammarPool) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "array"}), "response_format")
    pool.compile(spec).result(LONG_SECONDS)
    assert pool.compile(GrammarSpec("json_schema", spec.value, "tools")).done()
    assert not pool.compile(GrammarSpec("regex", spec.value)).done()
