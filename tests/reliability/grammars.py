"""Walk hostile grammars beside a harmless one, and look how long they hold up a step.

`python tests/reliability/grammars.py`. Each walk asks for masks and accepts tokens that they allow,
as a step of the engine does, until the grammar is ended for being slow or the walk is over. Every
step also asks for the mask of a plain JSON object: the step takes as long as the slowest mask, and
so waits every stream. Vocabularies: SmolLM2's 49,152 tokens, and 200,000 that are made from them.

The bound is 250 ms for a step, of which the model's part is taken to be at most 50 ms. A machine
that also runs other programs delays a step, so what counts is the time on an idle machine: the
longest processor time of a grammar's process in the step, or that of all processes divided by the
number of cores. The time that passed is printed beside it.
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

MAX_HOLD = 0.2  # seconds
STEPS = 300  # of a walk
SECONDS = 6.0  # for a walk
COMPILE_SECONDS = 60.0
OBJECT = GrammarSpec("json_object")
# What is ambiguous has many parses of the same text, each of which the matcher keeps.
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
    """What a walk found."""

    steps: int = 0
    held: float = 0.0  # the longest step, on an idle machine
    passed: float = 0.0  # the longest, on this one
    total: float = 0.0
    ended: str = "goes on"

    def __str__(self) -> str:
        mean = self.total / max(self.steps, 1)
        return (
            f"longest step {1000 * self.held:4.0f} ms ({1000 * self.passed:4.0f} here), "
            f"mean {1000 * mean:5.1f} of {self.steps:3} steps, {self.ended}"
        )


def preset_vocabulary() -> list[bytes]:
    """SmolLM2's tokens."""
    from slipstream.server.text.tokenizer import Tokenizer

    return Tokenizer.load(preset_model("smollm2-135m")).vocabulary()


def larger(vocabulary: Sequence[bytes], size: int) -> list[bytes]:
    """So many tokens: pairs of short ones, which a large vocabulary would have as one."""
    found = dict.fromkeys(vocabulary)
    chance = random.Random(0)
    words = [token for token in vocabulary if 2 <= len(token) <= 6 and token.isascii()]
    while len(found) < size:
        found[chance.choice(words) + chance.choice(words)] = None
    return [*vocabulary, *list(found)[len(dict.fromkeys(vocabulary)) :]][:size]


class Chooser:
    """Chooses tokens of letters that a mask allows, the longest ones in half of the cases."""

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
        """A token that the line allows; one of others if no letters are allowed."""
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
    """Walk these grammars together, beside a JSON object."""
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
        # A process that was ended had used what it may use, and was looked at every 5 ms.
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
    """Processor time that the processes of these jobs have used; 0 for one that has ended."""
    pids = {matcher_of(job).process.pid for job in jobs}
    return {pid: cpu_seconds(pid) for pid in pids}


def _advanced(
    jobs: Sequence[MaskJob], num_drafts: int, choose: Chooser
) -> tuple[list[GrammarMatcher], list[list[int]], int]:
    """The matchers that go on, drafts for their next masks, and how many were ended."""
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
            # Drafts for the next step: what may come after a letter is mostly a letter again.
            next_ids = [choose.choose(job.lines[-1]) for _ in range(num_drafts)]
            matchers.append(job.matcher)
            drafts.append([token for token in next_ids if token is not None])
    return matchers, drafts, num_slow


def several(spec: GrammarSpec, count: int) -> list[GrammarSpec]:
    """The grammar so many times, each with a difference, so that each has a process."""
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
    """Walk each grammar alone and with others of its kind."""
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
    """Measure; the complaints."""
    faults = []
    for make in vocabularies:
        for label, found in measure(make(), names, counts, drafts):
            line = f"{label}: {found}"
            print(line + ("  <--" if found.held > max_hold else ""), flush=True)
            if found.held > max_hold:
                faults.append(line)
    return faults


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="grammars whose names contain this")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16], help="at once")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4], help="verified at once")
    parser.add_argument("--max-hold", type=float, default=MAX_HOLD, help="seconds (default: 0.2)")
    options = parser.parse_args()
    own = preset_vocabulary()
    names = [name for name in HOSTILE if options.only in name]
    vocabularies = [lambda: own, lambda: larger(own, 200_000)]
    faults = run(vocabularies, names, options.counts, options.drafts, options.max_hold)
    print(f"{len(faults)} walks held a step up" if faults else "all well")
    return bool(faults)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
