"""A grammar pool for tests, slow and ambiguous grammars, and what /proc says of its processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.runner.grammars.grammar import MaskJob
from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.messages import GrammarSpec

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
