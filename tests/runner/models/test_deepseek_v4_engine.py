"""DeepSeek V4 in a whole engine: prefix hits, chunks, preemption, aborts and several choices."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import (
    AbortRequests,
    AddChildren,
    AddRequest,
    Child,
    SamplingParams,
)

from ...cases import some
from ...speculators.tiny_engine import TinyEngine
from ...speculators.v4_mtp_oracle import V4MtpOracle
from ..tiny_v4 import VOCAB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v4")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return V4MtpOracle(folder, max_position_embeddings=64).target


OFF = SpeculativeConfig()
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3, draft_sampling="greedy")


def some_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_greedy(oracle: Any, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the likeliest after those before it."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_text_is_greedy_whatever_the_chunks_and_hits(folder: Path, oracle: Any) -> None:
    asked = some_prompts((3, 30, 50))
    engine = TinyEngine(
        folder, OFF, cache={"num_gpu_blocks_override": 100},
        scheduler={"max_num_batched_tokens": 23, "max_num_seqs": 3},
    )  # fmt: skip
    run = engine.run(asked, max_tokens=9)
    hit = engine.run([prompt + [5] for prompt in asked], max_tokens=4)
    engine.close()
    for index, prompt in enumerate(asked):
        assert_greedy(oracle, prompt, run.tokens[str(index)])
        assert_greedy(oracle, prompt + [5], hit.tokens[str(index)])
    assert hit.cached_tokens == {"0": 0, "1": 24, "2": 48}


@pytest.mark.parametrize("speculative", some([OFF, MTP], [MTP]), ids=lambda it: it.method)
def test_preempted_aborted_and_several_choices(
    folder: Path, oracle: Any, speculative: SpeculativeConfig
) -> None:
    asked = some_prompts((11, 6, 36), seed=1)
    # 8 blocks of 8 tokens hold some of the requests
    engine = TinyEngine(folder, speculative, cache={"num_gpu_blocks_override": 9})
    params = SamplingParams(seed=0, max_tokens=16, temperature=0.0)
    engine.engine.handle([AddRequest("gone", asked[2], params)])
    for _ in range(3):
        engine.engine.step()
    children = [Child(f"child{n}", 0, 0, 16, None) for n in range(2)]
    two = AddChildren([asked[0]], params, children)
    more = [AddRequest(f"more{n}", asked[1], params) for n in range(2)]
    engine.engine.handle([AbortRequests(["gone"]), *two.requests(), *more])
    tokens: dict[str, list[int]] = {}
    preempted = 0
    while engine.engine.has_work():
        for step in engine.engine.step():
            preempted += step.stats.num_preemptions
            for output in step.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.close()
    assert preempted
    for name, output in tokens.items():
        assert len(output) == 16
        assert_greedy(oracle, asked[0] if name.startswith("child") else asked[1], output)
    assert len(tokens) == 4
