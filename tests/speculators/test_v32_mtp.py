"""DeepSeek V3.2 in a whole engine, with its MTP module: drafts, roll-back, hits, preemption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.models.families import deepseek_v32

from ..cases import some
from ..runner.parallel.thread_group import ThreadGroup, build_on_threads
from .mtp_oracle import MtpOracle
from .recorded_graphs import graph_engine
from .recorded_proposals import recorded_proposals
from .test_v4_mtp import GraphBackend, store_all
from .tiny_engine import TinyEngine, prompts, save_llama

K = 3
OFF = SpeculativeConfig()


def speculative(k: int = K, **changes: Any) -> SpeculativeConfig:
    options = {"num_speculative_tokens": k, "draft_sampling": "greedy"} | changes
    return SpeculativeConfig(method="mtp", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v32") / "target"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> MtpOracle:
    return MtpOracle(folder, family="DeepseekV32")


def assert_greedy(oracle: MtpOracle, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the likeliest after those before it."""
    with torch.no_grad():
        logits = oracle.target(torch.tensor([prompt + tokens])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_drafts_equal_transformers_in_chunks_and_after_hits(
    folder: Path, oracle: MtpOracle
) -> None:
    scheduler = {"max_num_batched_tokens": 31, "max_num_seqs": 4}
    engine = TinyEngine(folder, speculative(), scheduler=scheduler)
    prefix = prompts(1, seed=4, longest=40)[0] + list(range(20))
    asked = [prefix, *prompts(2, seed=9, longest=30)]
    with recorded_proposals() as seen:
        run = engine.run(asked, max_tokens=6)
        hit = engine.run([prefix + [7, 8, 9]], max_tokens=4)
    engine.close()
    assert run.accepted < run.drafted  # roll-back was exercised
    assert hit.cached_tokens["0"] >= len(prefix) - 2 * 4
    assert len(seen) > 10
    for tokens, drafts in seen[::2]:  # the oracle takes long
        assert drafts == oracle.drafts(tokens, K), f"after {len(tokens)} tokens"
    for index, prompt in enumerate(asked):
        assert_greedy(oracle, prompt, run.tokens[str(index)])
    assert_greedy(oracle, prefix + [7, 8, 9], hit.tokens["0"])


@pytest.mark.parametrize("k", some([1, 2, 3], [3]))
def test_text_is_that_of_the_target_alone_at_every_offset(
    folder: Path, oracle: MtpOracle, k: int
) -> None:
    """Prompts of eight consecutive lengths: drafts are rejected at every place in a block."""
    asked = [prompts(8, seed=3)[0][:1] * 2 + list(range(n)) for n in range(3, 11)]
    texts = []
    for config in (OFF, speculative(k)):
        engine = TinyEngine(folder, config)
        texts.append(engine.run(asked, max_tokens=10))
        engine.close()
    assert texts[1].tokens == texts[0].tokens
    assert texts[1].drafted > texts[1].accepted


def test_text_survives_preemption(folder: Path, oracle: MtpOracle) -> None:
    asked = prompts(8, seed=5, longest=30)
    engine = TinyEngine(folder, speculative(), cache={"num_gpu_blocks_override": 34})
    preempted = 0
    take = engine.engine.step

    def step() -> Any:
        nonlocal preempted
        found = take()
        preempted += sum(one.stats.num_preemptions for one in found)
        return found

    engine.engine.step = step  # type: ignore[method-assign]
    run = engine.run(asked, max_tokens=16)
    engine.close()
    assert preempted
    for index, prompt in enumerate(asked):
        assert_greedy(oracle, prompt, run.tokens[str(index)])


def rows_as_given(key: Tensor, value: None, cache: Tensor, slots: Tensor, fp8: None) -> None:
    store_all(key, value, cache, slots)


@pytest.mark.parametrize("loop", some([True, False], [True]))
def test_drafts_in_graphs_equal_eager_drafts(
    folder: Path, oracle: MtpOracle, loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target, draft prefill and decodes are recorded and replayed at growing lengths."""
    monkeypatch.setattr(deepseek_v32, "store_kv", rows_as_given)
    found = []
    for graphs in (False, True):
        args = (folder, speculative(), graphs)
        with graph_engine(*args, loop=loop, backend=GraphBackend(loop)) as engine:
            with recorded_proposals() as seen:
                run = engine.run(prompts(4, seed=2, longest=14), max_tokens=7)
            replays = dict(engine.replays)
        found.append((seen, run.tokens))
        assert graphs == bool(replays.get("target")) == bool(replays.get("draft prefill"))
        assert graphs == bool(replays.get("draft loop" if loop else "draft decode"))
    assert found[0] == found[1]


def test_two_ranks_emit_the_tokens_and_drafts_of_one(folder: Path, oracle: MtpOracle) -> None:
    groups: list[ThreadGroup] = []
    found = []
    for more in ({}, {"build": partial(build_on_threads, groups)}):
        engine = TinyEngine(folder, speculative(), **more)
        run = engine.run(prompts(2, longest=12), max_tokens=7)
        engine.close()
        found.append((run.tokens, run.num_drafts, run.accepted_per_pos))
    assert found[0] == found[1]
    groups[0].check()


def test_an_fp8_cache_and_random_weights(folder: Path, oracle: MtpOracle) -> None:
    cache = {"kv_cache_dtype": "fp8"}
    engine = TinyEngine(folder, speculative(load_format="dummy"), cache=cache)
    run = engine.run(prompts(2), max_tokens=6)
    engine.close()
    assert run.drafted > 0 and all(len(tokens) == 6 for tokens in run.tokens.values())


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_other_drafters_change_no_text(
    method: str, folder: Path, oracle: MtpOracle, tmp_path: Path
) -> None:
    """A drafter's plain caches lie beside the target's listed ones."""
    model = str(save_llama(tmp_path / "llama")) if method == "draft_model" else None
    config = SpeculativeConfig(method=method, model=model, num_speculative_tokens=2)
    asked = [[1, 2, 3, 4] * 5, *prompts(2, seed=6)]
    found = []
    for one in (OFF, config):
        engine = TinyEngine(folder, one)
        found.append(engine.run(asked, max_tokens=10))
        engine.close()
    assert found[1].tokens == found[0].tokens and found[1].drafted
