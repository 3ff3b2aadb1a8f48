"""Grammars in separate processes: what a bad one costs while it is compiled and while it masks."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.runner.grammars import remote
from slipstream.runner.grammars.grammar import GrammarTooSlow, MaskJob
from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.grammars.remote import RemoteMatcher
from slipstream.runner.messages import GrammarSpec

from ..schedule_bench import fill_rows
from .pool_probe import (
    AMBIGUOUS,
    EOS,
    LINE,
    LONG_SECONDS,
    OBJECT,
    VOCAB,
    VOCAB_SIZE,
    WORDS,
    children,
    eventually,
    job,
    new_child,
    nursery_pid,
    slow_to_compile,
    still_works,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

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


def test_a_grammar_that_takes_all_memory_ends_alone(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library allocates until it fails, here at once because of a tiny limit. If Python itself
    fails while it starts a thread, it waits for the thread until the process is ended."""
    import resource

    monkeypatch.setattr("slipstream.runner.grammars.pool.MAX_COMPILE_SECONDS", 10.0)
    before = children(nursery_pid(pool))
    patterns = {f"k{n}": {"type": "string", "pattern": "^[a-z]{3,60}$"} for n in range(400)}
    future = pool.compile(GrammarSpec("json_schema", json.dumps({"properties": patterns})))
    resource.prlimit(new_child(pool, before), resource.RLIMIT_AS, (1 << 20, 1 << 20))
    with pytest.raises(ValueError, match=r"crashed the compiler|memory|bad_alloc|longer than"):
        future.result(LONG_SECONDS)
    assert still_works(pool)


# --- masks ------------------------------------------------------------------------------------


def test_an_ambiguous_grammar_is_ended_before_it_holds_up_others(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STEADY_LINE_SECONDS", 0.001)
    other = pool.compile(OBJECT).result(LONG_SECONDS)
    by_and_by, at_once = [ord("a")] * 200, [VOCAB.index(WORDS[-1])] * 20
    # All masks together are too long, which the real limit notices after five seconds; then one is.
    limits = remote.BURST_SECONDS, remote.STEP_SECONDS
    for token_ids, burst, step in ((by_and_by, 0.1, 60.0), (at_once, *limits)):
        monkeypatch.setattr(remote, "BURST_SECONDS", burst)
        monkeypatch.setattr(remote, "STEP_SECONDS", step)
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


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 5])
def test_without_a_stop_token_a_grammar_ends_with_its_text(vocab_size: int) -> None:
    """Also where the stop token that the library needs would be in the last word of a mask."""
    backend = build_grammar_backend(VOCAB, "raw", [vocab_size + 9], vocab_size)  # never chosen
    assert isinstance(backend, GrammarPool)
    try:
        matcher = backend.compile(GrammarSpec("regex", "[0-9]{2}(xy)?z")).result(LONG_SECONDS)
        assert matcher.ends_with_text
        for letter in b"12xyz":
            assert not matcher.is_terminated and matcher.accept(letter)
        assert matcher.is_terminated and not matcher.accept(ord("z"))
        matcher.rollback(3)  # as of drafts that were not verified
        assert not matcher.is_terminated
        wide = -(-vocab_size // 32)
        asked = MaskJob(matcher, [ord("z"), ord("q")], np.empty((3, wide), np.int32))
        backend.fill([asked])
        assert asked.error is None and asked.num_cut == 1  # nothing may follow the text
        assert np.flatnonzero(bits(asked.lines[0])).tolist() == [ord("x"), ord("z")]
        assert matcher.accept(ord("z")) and matcher.is_terminated
        open_end = backend.compile(GrammarSpec("regex", "a+")).result(LONG_SECONDS)
        assert all(open_end.accept(ord("a")) and not open_end.is_terminated for _ in range(5))
        with pytest.raises(ValueError, match="only the empty text satisfies it"):
            backend.compile(GrammarSpec("regex", "")).result(LONG_SECONDS)
    finally:
        backend.shutdown()


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
