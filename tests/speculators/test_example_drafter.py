"""The documented example: small, found by its path, right, in graphs, and lossless."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from slipstream.configs.options import ConfigError
from slipstream.configs.schema import SpeculativeConfig
from slipstream.configs.speculative import read_speculative
from slipstream.runner.errors import RunnerError

from . import example_drafter
from .recorded_graphs import graph_engine
from .recorded_proposals import recorded_proposals
from .tiny_engine import TinyEngine, prompts, save_llama

METHOD = f"{example_drafter.__name__}:ExampleSpeculator"
K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    save_llama(folder / "target", layers=3)
    torch.manual_seed(3)
    save_file({"weight": torch.randn(32, 64) * 0.3}, folder / "model.safetensors")
    return folder


def speculative(folder: Path, **changes: object) -> SpeculativeConfig:
    options = {"num_speculative_tokens": K, "draft_sampling": "greedy"} | changes
    return SpeculativeConfig(method=METHOD, model=str(folder), **options)  # type: ignore[arg-type]


@functools.cache
def parts_of(folder: Path) -> tuple[Any, torch.Tensor]:
    """The target, and the weight of the drafter."""
    model = LlamaForCausalLM.from_pretrained(folder / "target").eval()
    return model, load_file(folder / "model.safetensors")["weight"]


def expected(folder: Path, tokens: list[int]) -> list[int]:
    """The drafts, by hand."""
    model, weight = parts_of(folder)
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        token, drafts = tokens[-1], []
        for _ in range(K):
            embedding = model.model.embed_tokens.weight[token]
            hidden = hidden + F.silu(weight @ torch.cat([embedding, hidden]))
            token = int(model.lm_head(hidden).argmax())
            drafts.append(token)
    return drafts


def test_it_is_short() -> None:
    assert len(Path(example_drafter.__file__).read_text().splitlines()) < 100


class _NoHead(example_drafter.ExampleSpeculator):
    def load_draft_model(self) -> Any:
        return torch.nn.Linear(1, 1)


def test_a_model_that_is_not_a_draft_model_is_said_at_the_start(folder: Path) -> None:
    host: Any = SimpleNamespace(max_model_len=64)
    with pytest.raises(ConfigError, match="Linear is not a draft model: derive it from"):
        _NoHead(speculative(folder), host)


@pytest.mark.parametrize("graphs", [False, True])
def test_its_drafts_are_right_eager_and_in_graphs(folder: Path, graphs: bool) -> None:
    with (
        graph_engine(folder / "target", speculative(folder), graphs) as engine,
        recorded_proposals() as seen,
    ):
        engine.run(prompts(4), max_tokens=8)
        assert ("draft loop" in engine.replays) == ("draft prefill" in engine.replays) == graphs
    assert len(seen) > 10
    for tokens, drafts in seen:
        assert drafts == expected(folder, tokens)


def test_it_is_lossless(folder: Path) -> None:
    alone = TinyEngine(folder / "target", SpeculativeConfig())
    drafted = TinyEngine(folder / "target", speculative(folder, draft_sampling="probabilistic"))
    asked = prompts(6, seed=3)
    assert drafted.run(asked, max_tokens=20).tokens == alone.run(asked, max_tokens=20).tokens
    alone.close()
    drafted.close()


def test_paths_that_lead_nowhere_are_said(folder: Path) -> None:
    found = read_speculative("-sc", {"method": "my_package.drafters:Mine"})
    assert found.method == "my_package.drafters:Mine"
    for wrong in ("my_package.drafters", "a b:C", ":Mine", "mine:"):
        with pytest.raises(ConfigError, match="method must be one of"):
            read_speculative("-sc", {"method": wrong})
    for method, message in (
        ("no_such_module_here:Mine", "cannot be loaded: No module named"),
        (f"{example_drafter.__name__}:Nothing", "cannot be loaded"),
        (f"{example_drafter.__name__}:ExampleHead", "is not a subclass of BaseSpeculator"),
    ):
        with pytest.raises((ConfigError, RunnerError), match=message):
            TinyEngine(folder / "target", SpeculativeConfig(method=method))
