"""Grammars in separate processes: what a bad one costs, and that nothing of it remains."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.runner.grammars import remote
from slipstream.runner.grammars.grammar import GrammarTooSlow, MaskJob, fill_rows
from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.grammars.process import Compiled, Nursery, read_message
from slipstream.runner.grammars.remote import RemoteMatcher
from slipstream.runner.messages import GrammarSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

EOS = 0
LETTERS = [bytes([byte]) for byte in range(1, 256)]
_RNG = random.Random(0)
WORDS = [
    "".join(_RNG.choice("abcdefghij klmnopq") for _ in range(length)).encode()
    for length in (*(2, 3, 4, 5, 6, 7) * 400, *(16, 32, 64) * 20, 127)
]
VOCAB = [b"", *LETTERS, *dict.fromkeys(WORDS)]
VOCAB_SIZE = -(-len(VOCAB) // 32) * 32
LINE = VOCAB_SIZE // 32
OBJECT = GrammarSpec("json_object")
# Every text of letters can be read in very many ways.
AMBIGUOUS = GrammarSpec("grammar", 'root ::= e\ne ::= e e | "(" e ")" | [a-z ]+ | [a-z ]*')
LONG_SECONDS = 30  # time limit for what is quick on an idle machine


def slow_to_compile(number: int = 0) -> GrammarSpec:
    """A grammar that keeps the compiler busy for half a minute or more."""
    return GrammarSpec("regex", "|".join("a" * length for length in range(1, 490)) + f"|b{number}")


def build() -> GrammarPool:
    backend = build_grammar_backend(VOCAB, "raw", [EOS], VOCAB_SIZE)
    assert isinstance(backend, GrammarPool)
    backend.prepare()
    backend.compile(OBJECT).result(LONG_SECONDS)
    return backend


@pytest.fixture(scope="module")
def pool() -> Iterator[GrammarPool]:
    backend = build()
    yield backend
    backend.shutdown()


def job(matcher: Any, draft_ids: list[int] | None = None) -> MaskJob:
    ids = draft_ids or []
    return MaskJob(matcher, ids, np.empty((len(ids) + 1, LINE), dtype=np.int32))


def nursery_pid(pool: GrammarPool) -> int:
    assert pool._nursery is not None
    return pool._nursery.result(LONG_SECONDS)._process.pid


def children(pid: int) -> set[int]:
    """The running child processes of a process, without zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


def eventually(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + LONG_SECONDS
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def new_child(pool: GrammarPool, before: set[int]) -> int:
    """The process that was started since."""
    assert eventually(lambda: len(children(nursery_pid(pool)) - before) == 1)
    (pid,) = children(nursery_pid(pool)) - before
    return pid


def still_works(pool: GrammarPool) -> bool:
    matcher = pool.compile(GrammarSpec("regex", "ab")).result(LONG_SECONDS)
    return matcher.accept(ord("a")) and matcher.accept(ord("b")) and matcher.accept(EOS)


# --- compiling --------------------------------------------------------------------------------


def test_a_compiler_that_crashes_costs_one_request(pool: GrammarPool) -> None:
    other = pool.compile(OBJECT).result(LONG_SECONDS)
    before = children(nursery_pid(pool))
    future = pool.compile(slow_to_compile())
    os.kill(new_child(pool, before), signal.SIGSEGV)
    with pytest.raises(ValueError, match="crashed the compiler"):
        future.result(LONG_SECONDS)
    assert other.accept(ord("{")) and still_works(pool)


def test_a_compilation_that_nobody_waits_for_is_killed(pool: GrammarPool) -> None:
    nursery = nursery_pid(pool)
    before = children(nursery)
    first, second = (pool.compile(slow_to_compile()) for _ in range(2))
    pid = new_child(pool, before)
    assert first.cancel()
    time.sleep(0.1)
    assert pid in children(nursery)  # the second still waits
    assert second.cancel()
    assert eventually(lambda: children(nursery) <= before)
    assert still_works(pool)


def test_slow_grammars_hold_up_neither_json_objects_nor_quick_ones(pool: GrammarPool) -> None:
    slow = [pool.compile(slow_to_compile(number)) for number in range(6)]
    assert pool.compile(OBJECT).done()
    assert still_works(pool)
    assert not any(future.done() for future in slow)
    for future in slow:
        future.cancel()


def test_a_grammar_that_takes_too_long_to_compile_is_an_error(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runner.grammars.pool.MAX_COMPILE_SECONDS", 0.2)
    before = children(nursery_pid(pool))
    with pytest.raises(ValueError, match="takes longer than"):
        pool.compile(slow_to_compile()).result(LONG_SECONDS)
    assert eventually(lambda: children(nursery_pid(pool)) <= before)


def test_compiling_yields_and_masks_do_not(pool: GrammarPool) -> None:
    def niceness(pid: int) -> list[int]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        stats = [(task / "stat").read_text().rpartition(")")[2].split() for task in tasks]
        return sorted(int(fields[16]) for fields in stats)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    before = children(nursery_pid(pool))
    future = pool.compile(slow_to_compile())
    pid = new_child(pool, before)
    assert eventually(lambda: niceness(pid) == [own, min(19, own + 5)])
    assert eventually(lambda: niceness(pid) == [own, min(19, own + 15)])  # it takes long
    future.cancel()
    assert {*niceness(nursery_pid(pool))} == {own}


def test_the_processes_are_cheap_and_bounded(pool: GrammarPool) -> None:
    kept = pool.compile(OBJECT).result(LONG_SECONDS)
    assert isinstance(kept, RemoteMatcher)
    pid = kept.process.pid  # others may be ending
    for each in (nursery_pid(pool), pid):
        maps = Path(f"/proc/{each}/maps").read_text()
        assert "xgrammar" in maps and "libtorch" not in maps
    limits = Path(f"/proc/{pid}/limits").read_text()
    (space,) = [line.split()[3] for line in limits.splitlines() if "address space" in line]
    assert int(space) < 6 << 30
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 800


def test_a_grammar_that_takes_all_memory_ends_alone(pool: GrammarPool) -> None:
    """The library allocates until it fails, here at once because of a tiny limit."""
    import resource

    before = children(nursery_pid(pool))
    patterns = {f"k{n}": {"type": "string", "pattern": "^[a-z]{3,60}$"} for n in range(400)}
    future = pool.compile(GrammarSpec("json_schema", json.dumps({"properties": patterns})))
    resource.prlimit(new_child(pool, before), resource.RLIMIT_AS, (1 << 20, 1 << 20))
    with pytest.raises(ValueError, match=r"crashed the compiler|memory|bad_alloc"):
        future.result(LONG_SECONDS)
    assert still_works(pool)


# --- masks ------------------------------------------------------------------------------------


def test_an_ambiguous_grammar_is_ended_before_it_holds_up_others(pool: GrammarPool) -> None:
    other = pool.compile(OBJECT).result(LONG_SECONDS)
    for token_ids in ([ord("a")] * 400, [VOCAB.index(WORDS[-1])] * 20):  # by and by, and at once
        matcher = pool.compile(AMBIGUOUS).result(LONG_SECONDS)
        assert isinstance(matcher, RemoteMatcher)
        longest = 0.0
        for token_id in token_ids:
            jobs = [job(matcher), job(other)]
            began = time.monotonic()
            pool.fill(jobs)
            longest = max(longest, time.monotonic() - began)
            assert jobs[1].error is None
            if jobs[0].error is not None:
                break
            assert matcher.accept(token_id)
        assert isinstance(jobs[0].error, GrammarTooSlow)
        assert longest < 2.0  # 0.13 on an idle machine; without the limit it takes minutes
    assert other.accept(ord("{")) and still_works(pool)


def test_the_delays_of_many_ambiguous_grammars_do_not_add_up(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may compute 0.11 s in a step; without a common limit, twelve delayed it by 0.7 s."""
    monkeypatch.setattr(remote, "num_cores", lambda: 2)
    other = pool.compile(OBJECT).result(LONG_SECONDS)
    specs = [GrammarSpec("grammar", f'{AMBIGUOUS.value} | "#{i}"') for i in range(12)]
    matchers = [pool.compile(spec).result(LONG_SECONDS) for spec in specs]
    spent = dict.fromkeys((matcher.process.pid for matcher in matchers), 0.0)  # type: ignore[attr-defined]
    slow: list[MaskJob] = []
    while not slow:
        before = {pid: remote.cpu_seconds(pid) for pid in spent}
        jobs = [job(matcher) for matcher in (*matchers, other)]
        with monkeypatch.context() as patch:  # a process that is ended says no more
            patch.setattr(pool, "_kill", lambda number: None)
            pool.fill(jobs)
        spent = {pid: remote.cpu_seconds(pid) - began for pid, began in before.items()}
        assert jobs.pop().error is None
        slow = [each for each in jobs if each.error is not None]
        if not slow:
            assert all(matcher.accept(VOCAB.index(WORDS[-1])) for matcher in matchers)
    assert {type(each.error) for each in slow} == {GrammarTooSlow}
    assert len(slow) == 12 and sum(spent.values()) < 12 * remote.STEP_SECONDS
    for matcher in matchers:
        pool._kill(matcher.process.number)  # type: ignore[attr-defined]
    assert other.accept(ord("{")) and still_works(pool)


def test_masks_that_take_too_long_in_total_end_only_their_request(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, other = (pool.compile(OBJECT).result(LONG_SECONDS) for _ in range(2))
    pool.fill([job(matcher)])
    monkeypatch.setattr("slipstream.runner.grammars.remote.BURST_SECONDS", 0.0)
    monkeypatch.setattr("slipstream.runner.grammars.remote.STEADY_LINE_SECONDS", 1e-7)
    slow = job(matcher)
    pool.fill([slow])
    assert isinstance(slow.error, GrammarTooSlow)
    monkeypatch.undo()
    assert other.accept(ord("{"))


def test_a_process_that_dies_while_masking_ends_only_its_requests(pool: GrammarPool) -> None:
    before = children(nursery_pid(pool))
    first, second = (pool.compile(AMBIGUOUS).result(LONG_SECONDS) for _ in range(2))
    other = pool.compile(OBJECT).result(LONG_SECONDS)
    os.kill(new_child(pool, before), signal.SIGKILL)
    jobs = [job(first), job(other), job(second)]
    pool.fill(jobs)
    assert [type(each.error) for each in jobs] == [OSError, type(None), OSError]
    assert pool.compile(AMBIGUOUS).result(LONG_SECONDS).accept(ord("a"))


def test_masks_equal_those_of_the_library_itself(pool: GrammarPool) -> None:
    """Compare random walks with drafts, half of them valid, to a matcher in this process."""
    pytest.importorskip("xgrammar")  # the whole of it, so that torch can still be imported
    from slipstream.runner.grammars.compiler import Compiler

    spec = GrammarSpec("regex", "([a-f]{2,3} ){3,9}[0-9]")
    compiler = Compiler(VOCAB, "raw", [EOS], VOCAB_SIZE)
    compiled, rng = compiler.compile(spec), random.Random(1)
    for _ in range(6):
        theirs, ours = compiler.matcher(compiled), pool.compile(spec).result(LONG_SECONDS)
        while not ours.is_terminated:
            ahead = fill_good(compiler.matcher(compiled), theirs, rng)
            drafts = [t if rng.random() < 0.8 else rng.randrange(-1, 99) for t in ahead]
            expected, asked = job(theirs, drafts), job(ours, drafts)
            expected.num_cut = fill_rows(theirs, drafts, expected.lines)
            pool.fill([asked])
            assert asked.error is None and asked.num_cut == expected.num_cut
            assert (asked.lines == expected.lines).all()
            for index in range(len(drafts) + 1):
                token_id = rng.choice(np.flatnonzero(bits(asked.lines[index])).tolist())
                if index < len(drafts) and rng.random() < 0.7:
                    token_id = max(0, drafts[index])
                assert ours.accept(token_id) == theirs.accept(token_id)
                assert ours.is_terminated == theirs.is_terminated
                if index >= len(drafts) or token_id != drafts[index] or ours.is_terminated:
                    break


def test_a_grammar_whose_first_mask_takes_long_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("xgrammar")
    from slipstream.runner.grammars.compiler import Compiler

    compiler = Compiler(VOCAB, "raw", [EOS], VOCAB_SIZE)
    compiled = compiler.compile(GrammarSpec("regex", "a+"))
    compiler.check_first_mask(compiled)
    monkeypatch.setattr("slipstream.runner.grammars.compiler.MAX_FIRST_MASK_SECONDS", 0.0)
    with pytest.raises(ValueError, match="takes too long"):
        compiler.check_first_mask(compiled)


def bits(line: np.ndarray) -> np.ndarray:
    return np.unpackbits(line.view(np.uint8), bitorder="little")


def fill_good(scratch: Any, matcher: Any, rng: random.Random) -> list[int]:
    """Return three allowed next tokens without moving the matcher."""
    line, found = np.empty(LINE, dtype=np.int32), []
    for _ in range(3):
        matcher.fill(line)
        found.append(rng.choice(np.flatnonzero(bits(line)).tolist()))
        if not matcher.accept(found[-1]) or matcher.is_terminated:
            break
    matcher.rollback(len(found))
    return found


# --- the processes' lives ---------------------------------------------------------------------


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
