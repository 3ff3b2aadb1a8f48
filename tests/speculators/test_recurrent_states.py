"""A model with recurrent states says the same with drafts, prefix hits, aborts and preemptions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import SpeculativeConfig

from .qwen_oracle import QwenOracle
from .recurrent_engine import NGRAM, STATE_BLOCK, check, engine, expected, texts


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen") / "target"


def test_texts_are_those_of_the_oracle(folder: Path, oracle: QwenOracle) -> None:
    prompts = texts(4)
    for prompt, text in zip(prompts, expected(folder, prompts, 8), strict=True):
        out = oracle.target.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert out[0, len(prompt) :].tolist() == text


def test_texts_with_drafts_prefix_hits_and_aborts(folder: Path, oracle: QwenOracle) -> None:
    run = check(folder, texts(12), NGRAM, 0)
    assert 0 < run.accepted < run.drafted
    hits = [count for count in run.cached_tokens.values() if count]
    assert len(hits) > 2 and all(count % STATE_BLOCK == 0 for count in hits)


def test_a_third_request_continues_where_two_parted(folder: Path, oracle: QwenOracle) -> None:
    """The first two share 29 tokens, and the last border of the first lies beyond them."""
    stem = list(range(29))
    asked = [stem + [i] * 30 for i in (3, 5, 7)]
    made = engine(folder, NGRAM)
    cached = [made.run([prompt], max_tokens=4).cached_tokens["0"] for prompt in asked]
    made.close()
    assert cached == [0, 0, 24]


def test_texts_without_drafts_but_with_prefix_hits(folder: Path, oracle: QwenOracle) -> None:
    run = check(folder, texts(8, seed=1), SpeculativeConfig(), 1)
    assert sum(run.cached_tokens.values()) > 0


def test_texts_of_preempted_requests(folder: Path, oracle: QwenOracle) -> None:
    """So few blocks that requests are preempted, small steps, and one saved state at a time."""
    cache = {"num_gpu_blocks_override": 45, "kv_cache_memory_bytes": 100_000}
    scheduler = {"max_num_batched_tokens": 34, "max_num_seqs": 8}
    check(folder, texts(7, seed=2), NGRAM, 2, cache=cache, scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_texts_of_many_requests(folder: Path, oracle: QwenOracle, drafts: int, seed: int) -> None:
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1
    )
    cache = {"num_gpu_blocks_override": random.Random(seed).choice([45, 80, 400])}
    check(folder, texts(200, seed=seed + 10), speculative, seed, cache=cache)
