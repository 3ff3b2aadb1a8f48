"""A whole engine on a tiny random Llama checkpoint, with any drafter; for tests of drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.engine.engine import build_engine
from slipstream.runner.loading.plain_config import plain_config
from slipstream.runner.messages import AddRequest, SamplingParams, StepOutputs

VOCAB, MAX_LEN = 61, 128


def save_llama(
    folder: Path,
    seed: int = 0,
    layers: int = 8,
    std: float = 0.4,
    vocab_size: int = VOCAB,
    max_len: int = MAX_LEN,
    heads: int = 4,
) -> Path:
    """A tiny Llama whose argmax is rarely a near-tie; returns its folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, max_position_embeddings=max_len,
        initializer_range=std, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def stated(folder: Path) -> Path:
    """Let the config.json of a saved Llama state what workers otherwise ask transformers for, whose
    import takes half of the time in which a process starts; returns the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    assert rope["rope_type"] == "default"
    more = {"rope_theta": rope["rope_theta"], "rope_scaling": None, "eos_token_id": []}
    path.write_text(json.dumps(config | more))
    assert plain_config(json.loads(path.read_text())) is not None
    return folder


@dataclass
class Run:
    """The results of an engine for a set of requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_drafts: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def take(self, step: StepOutputs) -> None:
        """Add one step's outputs and counters."""
        for output in step.outputs:
            assert output.error is None, output.error
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.cached_tokens.setdefault(output.request_id, output.num_cached_tokens)
        self.num_drafts += step.stats.num_drafts
        self.drafted += step.stats.num_draft_tokens
        self.accepted += step.stats.num_accepted_tokens
        grown = step.stats.accepted_per_pos
        width = max(len(grown), len(self.accepted_per_pos))
        both = [
            [*counts, *[0] * (width - len(counts))] for counts in (grown, self.accepted_per_pos)
        ]
        self.accepted_per_pos = [a + b for a, b in zip(*both, strict=True)]

    def acceptance(self) -> list[float]:
        """Accepted share by position, unconditional."""
        return [count / self.num_drafts for count in self.accepted_per_pos]


class TinyEngine:
    """An engine that is driven by hand."""

    def __init__(self, model: Path, speculative: SpeculativeConfig, **changes: Any) -> None:
        scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 96} | changes.pop("scheduler", {})
        cache = {"block_size": 4, "num_gpu_blocks_override": 400} | changes.pop("cache", {})
        graph = GraphConfig(**changes.pop("graph", {}))
        device, dtype = changes.pop("device", "cpu"), changes.pop("dtype", "float32")
        build = changes.pop("build", build_engine)
        load_format = changes.pop("load_format", "auto")
        assert not changes, changes
        self.engine = build(
            Config(
                model=ModelConfig(
                    model=str(model), dtype=dtype, device=device, load_format=load_format
                ),
                scheduler=SchedulerConfig(**scheduler),
                cache=CacheConfig(**cache),
                speculative=speculative,
                graph=graph,
            ),
            lambda _: None,
        )

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int = 40, **sampling: Any) -> Run:
        """Run all prompts together; request i has id str(i) and seed i."""
        self.engine.handle(
            [
                AddRequest(
                    str(i),
                    list(prompt),
                    SamplingParams(
                        seed=i, max_tokens=max_tokens, **({"temperature": 0.0} | sampling)
                    ),
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        run = Run()
        while self.engine.has_work():
            for step in self.engine.step():
                run.take(step)
        self.synchronize()
        return run

    def synchronize(self) -> None:
        """Wait for the drafts of the last step."""
        self.engine._runner.synchronize()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Free the engine's thread."""
        self.engine.shutdown()


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
