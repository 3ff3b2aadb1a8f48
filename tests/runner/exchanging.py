"""Shared by the tests of swapping a drafter: heads, an engine that drafts, and its answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import ChangeSpeculator, StepOutputs
from slipstream.speculators.training.export import Verifier, save_head
from slipstream.speculators.training.head import TrainingHead
from slipstream.speculators.training.vocabulary import choose_draft_vocabulary

from ..speculators.random_hidden_states import GEOMETRY
from ..speculators.tiny_engine import TinyEngine, prompts, save_llama

REQUESTS = prompts(6, seed=2)


def head(folder: Path, seed: int, **changes: Any) -> Path:
    """A random head with its own draft vocabulary."""
    geometry = replace(GEOMETRY, **changes)
    counts = torch.randperm(61, generator=torch.Generator().manual_seed(seed))
    vocabulary = choose_draft_vocabulary(counts, geometry.draft_vocab_size)
    weights = {
        name: p + torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        for name, p in TrainingHead(geometry, seed).named_parameters()
    }
    save_head(folder, weights, geometry, vocabulary, Verifier("t", ()), 3, dtype=torch.float32)
    return folder


def target_and_heads(base: Path) -> Path:
    """A tiny target and two heads for it."""
    save_llama(base / "target")
    for seed in (1, 2):
        head(base / f"head{seed}", seed)
    return base


def engine(heads: Path, which: int = 1, dtype: str = "float32") -> TinyEngine:
    speculative = SpeculativeConfig(
        "eagle3", str(heads / f"head{which}"), 3, draft_sampling="greedy", watchdog=False
    )
    return TinyEngine(heads / "target", speculative, dtype=dtype)


def model(made: TinyEngine) -> Any:
    return made.engine._runner.speculator.model


def content(made: TinyEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model(made).named_buffers()}


def told(made: TinyEngine, action: str, path: Path | str = "") -> StepOutputs:
    """Send a message and return the outputs that hold the answer."""
    made.engine.handle([ChangeSpeculator(action, str(path))])
    while made.engine.has_work():
        for outputs in made.engine.step():
            if outputs.speculator is not None:
                return outputs
    raise AssertionError("no answer")


def ask(made: TinyEngine, action: str, path: Path | None = None) -> str | None:
    """Send a message and run the engine until it answers. "try" loads the head first."""
    if path is not None and action == "try":
        if (error := ask(made, "load", path)) is not None:
            return error
        path = None
    answer = told(made, action, "" if path is None else path).speculator
    assert answer is not None
    return answer.error
