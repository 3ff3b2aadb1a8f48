"""Busy engines on a tiny model with recurrent states, and the texts that they should produce."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

from .tiny_engine import VOCAB, Run, TinyEngine

STATE_BLOCK = 8
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)


def engine(folder: Path, speculative: SpeculativeConfig = NGRAM, **changes: Any) -> TinyEngine:
    cache = {"state_block_size": STATE_BLOCK} | changes.pop("cache", {})
    return TinyEngine(folder, speculative, cache=cache, **changes)


def texts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of many lengths and repeat themselves, which drafts follow."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(60)]
    made = []
    for _ in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        made.append(stem[: rng.choice([0, 7, 8, 9, 16, 23, 40, 57])] + own * rng.randint(1, 3))
    return made


def expected(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The texts of the model without drafts and without a prefix cache."""
    plain = engine(folder, SpeculativeConfig(), cache={"enable_prefix_caching": False})
    run = plain.run(prompts, max_tokens=max_tokens)
    plain.close()
    return [run.tokens[str(i)] for i in range(len(prompts))]


def drive(
    made: TinyEngine,
    prompts: list[list[int]],
    max_tokens: int,
    rng: random.Random,
    aborts: bool = True,
) -> tuple[Run, set[str]]:
    """Requests arrive one after the other, and some are aborted; returns what the others said."""
    waiting, run, aborted = list(enumerate(prompts)), Run(), set()
    while waiting or made.engine.has_work():
        if waiting and rng.random() < 0.4:
            index, prompt = waiting.pop(0)
            sampling = SamplingParams(seed=index, max_tokens=max_tokens, temperature=0.0)
            made.engine.handle([AddRequest(str(index), prompt, sampling)])
        if aborts and rng.random() < 0.05 and run.tokens:
            victim = rng.choice(list(run.tokens))
            aborted.add(victim)
            made.engine.handle([AbortRequests([victim])])
        for step in made.engine.step():
            run.take(step)
    made.synchronize()
    return run, aborted


def check(
    folder: Path,
    prompts: list[list[int]],
    speculative: SpeculativeConfig,
    seed: int,
    **changes: Any,
) -> Run:
    """Compare the texts of a busy engine with those of a plain one."""
    wanted = expected(folder, prompts, 14)
    made = engine(folder, speculative, **changes)
    run, aborted = drive(made, prompts, 14, random.Random(seed))
    made.close()
    for index, text in enumerate(wanted):
        got = run.tokens.get(str(index), [])
        assert got == (text[: len(got)] if str(index) in aborted else text), f"request {index}"
    return run
