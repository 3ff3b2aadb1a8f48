"""Measures how long adversarial grammars delay a step.

Run `python tests/reliability/grammars.py`. Each walk requests masks and accepts allowed tokens, as
the engine does in its steps, until the grammar is ended for being too slow or the walk is complete.
Every step also requests the mask of a plain JSON object, since in the engine all streams wait for
the slowest mask. The vocabularies are SmolLM2's 49,152 tokens, and 200,000 made from them.

A step may be delayed by 250 ms, of which 50 ms are allowed for the model, so that 200 ms remain for
the masks. Other programs on the machine also delay steps. The checked time is therefore an estimate
for an idle machine: the longest CPU time of a grammar's process in the step, or the CPU time of all
processes divided by the number of cores, whichever is longer. The real time is printed after it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.configs.preset import preset_model
from slipstream.runner.grammars.grammar import GrammarMatcher, MaskJob
from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.grammars.remote import (
    MAX_LINE_SECONDS,
    STEP_SECONDS,
    cpu_seconds,
    matcher_of,
)
from slipstream.runner.messages import GrammarSpec

MAX_HOLD = 0.2  # seconds that the masks of a step may take
STEPS = 300  # at most in a walk
SECONDS = 6.0  # at most for a walk
COMPILE_SECONDS = 60.0
OBJECT = GrammarSpec("json_object")
# Most are ambiguous: the matcher keeps every parse of a text.
HOSTILE: dict[str, GrammarSpec] = {
    name: GrammarSpec(kind, text)
    for name, kind, text in (
        ("e e", "grammar", 'root ::= e\ne ::= e e | "(" e ")" | [a-z ]+ | [a-z ]*'),
        ("e e e", "grammar", 'root ::= e\ne ::= e e e | e e | [a-z] | ""'),
        ("letters", "grammar", 'root ::= s\ns ::= s s | "a" | "b" | "c" | "e" | "t" | " "'),
        ("right", "grammar", 'root ::= r\nr ::= [a-z ]+ r | [a-z ]* r | "" | [a-z ]'),
        ("operators", "grammar", 'root ::= e\ne ::= e "+" e | e "*" e | [0-9a-z ]* | "(" e ")"'),
        (
            "two rules",
            "grammar",
            "root ::= a\na ::= a b | b a | [a-z ]*\nb ::= b a | [a-z ]* b | [a-z ]",
        ),
        (
            "nullable",
            "grammar",
            'root ::= a\na ::= b c d a | ""\nb ::= [a-z ]*\nc ::= [a-z ]*\nd ::= [a-z ]*',
        ),
        ("stars", "regex", "((([a-z ]*)*)*)*!"),
        ("pairs", "regex", "(([a-z ]|[a-z ][a-z ])+)+!"),
        ("repeats", "regex", "([a-z ]{0,30}){0,30}!"),
        (
            "any of 40 objects",
            "json_schema",
            '{"anyOf":['
            + ",".join(
                f'{{"type":"object","properties":{{"a{i}":{{"type":"string"}}}},'
                f'"required":["a{i}"]}}'
                for i in range(40)
            )
            + "]}",
        ),
    )
}


@dataclass
class Walk:
    """The times of a walk in seconds, and how it ended."""

    steps: int = 0
    held: float = 0.0  # the longest step, estimated for an idle machine
    passed: float = 0.0  # the longest step, measured
    total: float = 0.0
    ended: str = "completed"

    def __str__(self) -> str:
        mean = self.total / max(self.steps, 1)
        return (
            f"longest step {1000 * self.held:4.0f} ms ({1000 * self.passed:4.0f} measured), "
            f"mean {1000 * mean:5.1f} of {self.steps:3} steps, {self.ended}"
        )


def preset_vocabulary() -> list[bytes]:
    """The bytes of SmolLM2's tokens."""
    from slipstream.server.text.tokenizer import Tokenizer

    return Tokenizer.load(preset_model("smollm2-135m")).vocabulary()


def larger(vocabulary: Sequence[bytes], size: int) -> list[bytes]:
    """Extend a vocabulary to `size` tokens with random pairs of its short tokens."""
    found = dict.fromkeys(vocabulary)
    chance = random.Random(0)
    words = [token for token in vocabulary if 2 <= len(token) <= 6 and token.isascii()]
    while len(found) < size:
        found[chance.choice(words) + chance.choice(words)] = None
    return [*vocabulary, *list(found)[len(dict.fromkeys(vocabulary)) :]][:size]


class Chooser:
    """Chooses random tokens of letters that a mask allows, in half of the cases a long one."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        plain = [
            (index, token)
            for index, token in enumerate(vocabulary)
            if token and all(97 <= byte <= 122 or byte == 32 for byte in token)
        ]
        plain.sort(key=lambda entry: -len(entry[1]))
        self._letters = np.array([index for index, _ in plain])
        self._chance = random.Random(1)

    def choose(self, line: np.ndarray) -> int | None:
        """Choose a token from the line of a mask; None if the line allows none.

        It has other characters only if the line allows no token of letters."""
        ids = self._letters[_allowed(line, self._letters)]
        if not len(ids):
            ids = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))
            if not len(ids):
                return None
        some = min(len(ids), 50) if self._chance.random() < 0.5 else len(ids)
        return int(ids[self._chance.randrange(some)])


def _allowed(line: np.ndarray, ids: np.ndarray) -> np.ndarray:
    found: np.ndarray = (line.view(np.uint32)[ids // 32] >> (ids % 32).astype(np.uint32)) & 1 == 1
    return found


def walk(
    pool: GrammarPool, specs: Sequence[GrammarSpec], num_drafts: int, choose: Chooser, width: int
) -> Walk:
    """Walk several grammars and a JSON object concurrently; returns the times.

    The JSON object must not fail. `width` is the number of 32-bit words in the line of a mask."""
    other = pool.compile(OBJECT).result(COMPILE_SECONDS)
    futures = [pool.compile(spec) for spec in specs]
    matchers: list[GrammarMatcher] = []
    found = Walk()
    for future in futures:
        try:
            matchers.append(future.result(COMPILE_SECONDS))
        except ValueError as error:
            found.ended = f"refused: {error}"
    drafts: list[list[int]] = [[] for _ in matchers]
    until = time.monotonic() + SECONDS
    num_ended = 0
    while matchers and found.steps < STEPS and time.monotonic() < until:
        jobs = [
            MaskJob(matcher, ids, np.empty((len(ids) + 1, width), dtype=np.int32))
            for matcher, ids in zip(matchers, drafts, strict=True)
        ]
        plain = MaskJob(other, [], np.empty((1, width), dtype=np.int32))
        before, began = computed([*jobs, plain]), time.monotonic()
        pool.fill([*jobs, plain])
        passed, after = time.monotonic() - began, computed([*jobs, plain])
        assert plain.error is None, plain.error
        # The CPU time of a process that was ended is unknown; assume the limit, plus 5 ms because
        # it is checked every 5 ms.
        most = STEP_SECONDS + MAX_LINE_SECONDS * (num_drafts + 1) + 0.005
        spent = [after[pid] - before[pid] if after[pid] else most for pid in before]
        held = min(passed, max(*spent, sum(spent) / (os.cpu_count() or 1)))
        found.steps += 1
        found.total += held
        found.held, found.passed = max(found.held, held), max(found.passed, passed)
        matchers, drafts, num_slow = _advanced(jobs, num_drafts, choose)
        num_ended += num_slow
    if num_ended:
        found.ended = f"{num_ended} of {len(specs)} ended"
    return found


def computed(jobs: Sequence[MaskJob]) -> dict[int, float]:
    """Seconds of CPU time that each job's process has used, by id; 0 if the process has ended."""
    pids = {matcher_of(job).process.pid for job in jobs}
    return {pid: cpu_seconds(pid) for pid in pids}


def _advanced(
    jobs: Sequence[MaskJob], num_drafts: int, choose: Chooser
) -> tuple[list[GrammarMatcher], list[list[int]], int]:
    """Accept each job's drafts and one more token.

    Returns the matchers that continue, their next drafts, and how many grammars were ended."""
    matchers, drafts, num_slow = [], [], 0
    for job in jobs:
        if job.error is not None:
            num_slow += 1
            continue
        for index in range(len(job.draft_ids) - job.num_cut + 1):
            token = choose.choose(job.lines[index])
            if index < len(job.draft_ids) - job.num_cut:
                token = job.draft_ids[index]
            if token is None or not job.matcher.accept(token):
                break
        else:
            # Drafts for the next step: after a letter, most grammars allow any letter.
            next_ids = [choose.choose(job.lines[-1]) for _ in range(num_drafts)]
            matchers.append(job.matcher)
            drafts.append([token for token in next_ids if token is not None])
    return matchers, drafts, num_slow


def several(spec: GrammarSpec, count: int) -> list[GrammarSpec]:
    """Return `count` variants of a grammar; they differ, so that each gets its own process."""
    if count == 1:
        return [spec]
    if spec.kind == "regex":
        return [GrammarSpec("regex", f"{spec.value}|#{i}") for i in range(count)]
    if spec.kind == "grammar":
        return [GrammarSpec("grammar", f'{spec.value} | "#{i}"') for i in range(count)]
    return [GrammarSpec(spec.kind, spec.value.replace('"a0"', f'"b{i}"')) for i in range(count)]


def measure(
    vocabulary: Sequence[bytes], names: Sequence[str], counts: Sequence[int], drafts: Sequence[int]
) -> Iterator[tuple[str, Walk]]:
    """Walk each grammar with every count and draft length; yields a label and the walk."""
    width = -(-len(vocabulary) // 32)
    pool = build_grammar_backend(vocabulary, "raw", [0], width * 32)
    assert isinstance(pool, GrammarPool)
    choose = Chooser(vocabulary)
    try:
        pool.prepare()
        pool.compile(OBJECT).result(COMPILE_SECONDS)
        for count, num_drafts, name in itertools.product(counts, drafts, names):
            specs = several(HOSTILE[name], count)
            label = f"{len(vocabulary):7,} tokens  {count:2} x {name:18} {num_drafts} drafts"
            yield label, walk(pool, specs, num_drafts, choose, width)
    finally:
        pool.shutdown()


def run(
    vocabularies: Sequence[Callable[[], Sequence[bytes]]],
    names: Sequence[str],
    counts: Sequence[int],
    drafts: Sequence[int],
    max_hold: float = MAX_HOLD,
) -> list[str]:
    """Measure and print all walks; returns the lines of those that exceed `max_hold`."""
    faults = []
    for make in vocabularies:
        for label, found in measure(make(), names, counts, drafts):
            line = f"{label}: {found}"
            print(line + ("  <--" if found.held > max_hold else ""), flush=True)
            if found.held > max_hold:
                faults.append(line)
    return faults


def main() -> int:
    """Run all walks; returns 0 if none exceeds the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="grammars whose names contain this")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 4, 16], help="concurrent grammars"
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4], help="drafts per step")
    parser.add_argument(
        "--max-hold", type=float, default=MAX_HOLD, help="seconds for the masks (default: 0.2)"
    )
    options = parser.parse_args()
    own = preset_vocabulary()
    names = [name for name in HOSTILE if options.only in name]
    vocabularies = [lambda: own, lambda: larger(own, 200_000)]
    faults = run(vocabularies, names, options.counts, options.drafts, options.max_hold)
    print(f"{len(faults)} walks delayed a step for too long" if faults else "no faults")
    return bool(faults)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
