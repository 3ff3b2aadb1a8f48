"""A model with recurrent states says the same with drafts, prefix hits, aborts and preemptions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

from .tiny_engine import VOCAB, Run, TinyEngine

STATE_BLOCK = 8
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)


def save_qwen(folder: Path, **settings: Any) -> Path:
    """A tiny Qwen3.5 whose argmax is rarely a near-tie; returns its folder."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None,
        initializer_range=0.3, **settings,
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "A_log" in name:
                tensor.sub_(4)  # states that remember
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


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
    made: TinyEngine, prompts: list[list[int]], max_tokens: int, rng: random.Random
) -> tuple[Run, set[str]]:
    """Requests arrive one after the other, and some are aborted; returns what the others said."""
    waiting, run, aborted = list(enumerate(prompts)), Run(), set()
    while waiting or made.engine.has_work():
        if waiting and rng.random() < 0.4:
            index, prompt = waiting.pop(0)
            sampling = SamplingParams(seed=index, max_tokens=max_tokens, temperature=0.0)
            made.engine.handle([AddRequest(str(index), prompt, sampling)])
        if rng.random() < 0.05 and run.tokens:
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


def test_texts_are_those_of_the_oracle(folder: Path) -> None:
    prompts = texts(4)
    oracle = transformers.Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    for prompt, text in zip(prompts, expected(folder, prompts, 8), strict=True):
        out = oracle.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert out[0, len(prompt) :].tolist() == text


def test_texts_with_drafts_prefix_hits_and_aborts(folder: Path) -> None:
    run = check(folder, texts(12), NGRAM, 0)
    assert 0 < run.accepted < run.drafted
    hits = [count for count in run.cached_tokens.values() if count]
    assert len(hits) > 2 and all(count % STATE_BLOCK == 0 for count in hits)


def test_texts_without_drafts_but_with_prefix_hits(folder: Path) -> None:
    run = check(folder, texts(8, seed=1), SpeculativeConfig(), 1)
    assert sum(run.cached_tokens.values()) > 0


def test_texts_of_preempted_requests(folder: Path) -> None:
    """So few blocks that requests are preempted, small steps, and one saved state at a time."""
    cache = {"num_gpu_blocks_override": 45, "kv_cache_memory_bytes": 100_000}
    scheduler = {"max_num_batched_tokens": 34, "max_num_seqs": 8}
    check(folder, texts(9, seed=2), NGRAM, 2, cache=cache, scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_texts_of_many_requests(folder: Path, drafts: int, seed: int) -> None:
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1
    )
    cache = {"num_gpu_blocks_override": random.Random(seed).choice([45, 80, 400])}
    check(folder, texts(200, seed=seed + 10), speculative, seed, cache=cache)
