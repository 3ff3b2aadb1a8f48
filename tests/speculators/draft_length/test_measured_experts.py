"""Steps that are timed at start-up touch as many experts as steps of real requests."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.schema import Config, SchedulerConfig, SpeculativeConfig
from slipstream.runner.models import moe
from slipstream.runner.step import step_timing
from slipstream.runner.step.warm_up import different_tokens

from ..tiny_engine import MAX_LEN, VOCAB, TinyEngine

EXPERTS, TOP_K, DRAFTS, REQUESTS = 32, 2, 3, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=MAX_LEN, initializer_range=0.4,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=16,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_timed_rows_choose_as_many_experts_as_real_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal rows, a step of any number of requests would touch the experts of one token."""
    touched: dict[int, list[int]] = defaultdict(list)  # rows of a step -> experts of each layer
    select = moe.select_experts

    def noted(*args: Any) -> Any:
        weights, ids = select(*args)
        touched[ids.shape[0]].append(ids.unique().numel())
        return weights, ids

    def mean(rows: int) -> float:
        return sum(touched[rows]) / len(touched[rows])

    drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    limits = {"max_num_seqs": REQUESTS + 1, "max_num_batched_tokens": 96}
    engine = TinyEngine(folder, drafter, scheduler=limits)
    monkeypatch.setattr(step_timing, "_CPU_SECONDS", 1e6)  # all cells, on a busy machine too
    monkeypatch.setattr(moe, "select_experts", noted)
    every = (DRAFTS + 1, REQUESTS, REQUESTS * (DRAFTS + 1))
    generator = torch.Generator().manual_seed(0)
    for rows in every:
        for _ in range(8):
            prompt = torch.randint(VOCAB, (rows,), generator=generator).tolist()
            engine.run([prompt], max_tokens=1)
    real = {rows: mean(rows) for rows in every}
    touched.clear()
    config = Config(scheduler=SchedulerConfig(**limits), speculative=drafter)
    found = step_timing.measure_steps(engine.engine._runner, config)  # type: ignore[attr-defined]
    engine.close()
    assert set(found) == {(1, 0), (REQUESTS, 0), (1, DRAFTS), (REQUESTS, DRAFTS)}
    assert set(touched[1]) == {TOP_K}
    for rows, expected in real.items():
        assert expected > 1.5 * TOP_K and mean(rows) > 0.8 * expected


def test_tokens_differ() -> None:
    for count, vocab_size in ((7, 7), (2000, 151936), (300, 1000)):
        tokens = different_tokens(count, vocab_size)
        assert len(set(tokens)) == count and 0 <= min(tokens) and max(tokens) < vocab_size
    assert set(different_tokens(10, 3)) == {0, 1, 2}
    assert different_tokens(3, 1) == [0, 0, 0]
