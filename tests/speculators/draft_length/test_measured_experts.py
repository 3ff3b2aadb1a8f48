"""Steps that are timed at start-up touch as many experts as steps of real requests."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.schema import Config, SchedulerConfig, SpeculativeConfig
from slipstream.runner.messages import SamplingParams
from slipstream.runner.models import moe
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan
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


def note_experts(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """From now on, rows of a step -> the number of experts that each layer of it touches."""
    touched: dict[int, list[int]] = defaultdict(list)
    select = moe.select_experts

    def noted(*args: Any) -> Any:
        weights, ids = select(*args)
        touched[ids.shape[0]].append(ids.unique().numel())
        return weights, ids

    monkeypatch.setattr(moe, "select_experts", noted)
    return touched


def test_timed_rows_choose_as_many_experts_as_real_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal rows, a step of any number of requests would touch the experts of one token."""

    def mean(rows: int) -> float:
        return sum(touched[rows]) / len(touched[rows])

    drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    limits = {"max_num_seqs": REQUESTS + 1, "max_num_batched_tokens": 96}
    engine = TinyEngine(folder, drafter, scheduler=limits)
    monkeypatch.setattr(step_timing, "_CPU_SECONDS", 1e6)  # all cells, on a busy machine too
    touched = note_experts(monkeypatch)
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


@pytest.fixture
def dummy_folder(tmp_path: Path) -> Path:
    """A model whose dummy weights make the rows of one context alike, as those of large models."""
    transformers.Qwen3MoeConfig(
        vocab_size=2000, hidden_size=512, num_hidden_layers=4, num_attention_heads=16, head_dim=32,
        num_key_value_heads=4, max_position_embeddings=256, num_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=16, eos_token_id=None, bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def decode_real_requests(runner: Any, num_reqs: int, counts: tuple[int, ...]) -> None:
    """Run three steps for each K of `counts`, of requests with different random prompts."""
    generator, length, room = torch.Generator().manual_seed(1), 64, 12
    sampling = SamplingParams(seed=0, max_tokens=64, temperature=0.0)
    new = [
        NewRequest(
            slot, torch.randint(2000, (length,), generator=generator).tolist(), length, 0,
            [list(range(1 + slot * room, 1 + slot * room + room))], sampling,
        )
        for slot in range(num_reqs)
    ]  # fmt: skip
    rows = [ScheduledRow(slot, length, 0, 0, False, 0) for slot in range(num_reqs)]
    runner.execute(StepPlan(-1000, new_requests=new, rows=rows)).get()
    table = runner.table
    for step, k in enumerate(k for k in counts for _ in range(3)):
        runner.synchronize()
        with torch.inference_mode():
            drawn = torch.randint(2000, (num_reqs, k + 1), generator=generator)
            table.last_sampled_tokens[:num_reqs] = drawn[:, 0]
            table.draft_tokens[:num_reqs, :k] = drawn[:, 1:]
        rows = [ScheduledRow(slot, k + 1, k, length, False, 1) for slot in range(num_reqs)]
        runner.execute(StepPlan(-1001 - step, rows=rows)).get()
    runner.execute(StepPlan(-1100, freed_slots=list(range(num_reqs)))).get()


def test_timed_requests_have_contexts_of_their_own(
    dummy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention makes the rows of one context alike, so that requests that share one would touch
    few experts, however different their tokens are."""

    def means(rows: tuple[int, ...]) -> list[float]:
        return [sum(touched[count]) / len(touched[count]) for count in rows]

    num_reqs, rows = 12, (12, 48)
    drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    limits = {"max_num_seqs": num_reqs + 1, "max_num_batched_tokens": 1024}
    cache = {"block_size": 8, "num_gpu_blocks_override": 200}
    engine = TinyEngine(dummy_folder, drafter, load_format="dummy", scheduler=limits, cache=cache)
    monkeypatch.setattr(step_timing, "_CPU_SECONDS", 1e6)
    monkeypatch.setattr(step_timing, "_CPU_SIZES", (num_reqs,))
    monkeypatch.setattr(step_timing, "_PROMPT_LEN", step_timing._EXPERTS_PROMPT_LEN)
    touched = note_experts(monkeypatch)
    runner: Any = engine.engine._runner
    decode_real_requests(runner, num_reqs, (0, DRAFTS))
    real = means(rows)
    touched.clear()
    config = Config(scheduler=SchedulerConfig(**limits), speculative=drafter)
    step_timing.measure_steps(runner, config)
    engine.close()
    assert real[0] > 6 * 4 and real[1] < 0.95 * 64
    assert means(rows) == pytest.approx(real, rel=0.1)


def test_tokens_differ() -> None:
    for count, vocab_size in ((7, 7), (2000, 151936), (300, 1000)):
        tokens = different_tokens(count, vocab_size)
        assert len(set(tokens)) == count and 0 <= min(tokens) and max(tokens) < vocab_size
    assert set(different_tokens(10, 3)) == {0, 1, 2}
    assert different_tokens(3, 1) == [0, 0, 0]
