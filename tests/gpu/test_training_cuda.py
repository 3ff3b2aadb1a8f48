"""Heads are trained in bf16 on a GPU, and swapped in while graphs are captured on their weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.configs.training import HeadConfig, ReplyConfig, TrainingConfig, TrainJob
from slipstream.runner.engine.engine import build_engine
from slipstream.runner.messages import AddRequest, ChangeSpeculator, SamplingParams
from slipstream.runner.training.text import TrainingPrompt
from slipstream.runner.training.train import TrainingRun, write_prompts

from ..speculators.tiny_engine import prompts, save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def config(target: Path, **changes: object) -> Config:
    base = Config(
        model=ModelConfig(model=str(target), dtype="bfloat16", device="cuda"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        cache=CacheConfig(num_gpu_blocks_override=200, enable_prefix_caching=False),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def train(target: Path, folder: Path, seed: int) -> list[dict[str, object]]:
    """Train a head for 40 steps into `folder`; returns the lines of its log."""
    (folder / "work").mkdir(parents=True)
    chosen = [TrainingPrompt(tuple(ids), "", i % 4 == 0) for i, ids in enumerate(prompts(16))]
    write_prompts(folder / "work" / "prompts.jsonl", chosen)
    job = TrainJob(
        config(target), str(folder), "tiny", "test",
        reply=ReplyConfig(max_reply_tokens=16, temperatures=(0.0,)),
        head=HeadConfig(draft_vocab_size=48),
        training=TrainingConfig(max_steps=40, eval_every=20, learning_rate=5e-3, train_seed=seed),
    )  # fmt: skip
    assert TrainingRun(job).run() == 0
    log = (folder / "work" / "training.jsonl").read_text()
    return [json.loads(line) for line in log.splitlines()]


def test_heads_train_in_bfloat16_and_a_swapped_head_drafts_as_a_fresh_one(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", heads=2)
    for seed in (1, 2):
        losses = [
            line["loss"] for line in train(target, tmp_path / f"head{seed}", seed) if "loss" in line
        ]
        assert losses[-1] < losses[0]

    def run(which: int, swap_to: int | None) -> dict[str, list[int]]:
        speculative = SpeculativeConfig(
            "eagle3", str(tmp_path / f"head{which}"), 3, draft_sampling="greedy", watchdog=False
        )
        engine = build_engine(config(target, speculative=speculative), lambda _: None)
        if swap_to is not None:
            for action, model in (("load", str(tmp_path / f"head{swap_to}")), ("try", "")):
                engine.handle([ChangeSpeculator(action, model)])
                while engine.has_work():
                    for outputs in engine.step():
                        assert outputs.speculator is None or outputs.speculator.error is None
        engine.handle(
            [
                AddRequest(str(i), ids, SamplingParams(seed=i, max_tokens=24, temperature=0.0))
                for i, ids in enumerate(prompts(6, seed=5))
            ]
        )
        accepted: dict[str, list[int]] = {}
        while engine.has_work():
            for step in engine.step():
                for output in step.outputs:
                    assert output.error is None
                    accepted.setdefault(output.request_id, []).append(output.num_accepted_tokens)
        engine.shutdown()
        return accepted

    assert run(1, swap_to=2) == run(2, swap_to=None)
