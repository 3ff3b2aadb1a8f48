"""A drafter that cannot be used is refused before the target's weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.runner import draft_heads, startup
from slipstream.runner.errors import ModelLoadError
from slipstream.speculators.registry import _SPECULATORS

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Reached(Exception):
    """The target's weights would be read now."""


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(startup, "load_weights", load)


def folder(path: Path, config: dict[str, Any] | str, weights: bool = True) -> str:
    path.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text)
    if weights:
        save_file({"any": torch.zeros(1)}, path / "model.safetensors")
    return str(path)


def start(tmp_path: Path, method: str, drafter: str, **options: Any) -> None:
    target = folder(tmp_path / "target", TARGET)
    speculative = SpeculativeConfig(method=method, model=drafter, **options)
    startup.assemble(
        Config(model=ModelConfig(model=target, device="cpu"), speculative=speculative),
        lambda progress: None,
    )


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("eagle3", "{", "is not valid JSON"),
        ("eagle", {"hidden_size": 32}, "no vocab_size or hidden_size"),
        ("eagle3", TARGET | {"target_hidden_size": 64}, "a target of hidden size 64, but .* 32"),
        ("eagle", TARGET | {"vocab_size": 62}, "vocabulary has 62 tokens, the target's 61"),
        (
            "eagle3",
            TARGET | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            "must rise within 0 .. 8",
        ),
        ("draft_model", TARGET | {"vocab_size": 62}, "has 62 tokens, .* 61: .* share a tokenizer"),
        ("draft_model", TARGET | {"model_type": "gpt2", "architectures": ["G"]}, "not supported"),
        ("mtp", TARGET, "needs a DeepSeek V3 target, but this one is llama"),
        ("gemma4_mtp", TARGET, "needs a gemma4_assistant checkpoint, but .* of type llama"),
    ],
)
def test_a_config_that_does_not_suit_the_target_is_refused(
    tmp_path: Path, method: str, config: dict[str, Any] | str, words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        start(tmp_path, method, folder(tmp_path / "drafter", config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_a_drafter_without_weights_is_refused_unless_they_are_random(
    tmp_path: Path, method: str
) -> None:
    drafter = folder(tmp_path / "drafter", TARGET, weights=False)
    with pytest.raises(ModelLoadError, match=r"drafter has no .safetensors files"):
        start(tmp_path, method, drafter)


def test_every_method_with_a_model_is_checked() -> None:
    assert set(draft_heads._DRAFTERS) == set(_SPECULATORS) - {"ngram"}
    for kind in ("ngram", "draft_model", "no such"):
        with pytest.raises(ModelLoadError, match=f"there is no draft head of kind '{kind}'"):
            draft_heads.load_head(kind, SpeculativeConfig(kind), None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_what_suits_is_loaded_after_the_target(tmp_path: Path, method: str) -> None:
    dummy = method == "eagle"
    drafter = folder(tmp_path / "drafter", TARGET, weights=not dummy)
    with pytest.raises(Reached):
        start(tmp_path, method, drafter, load_format="dummy" if dummy else "auto")
