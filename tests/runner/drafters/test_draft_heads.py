"""A drafter that cannot be used is refused before the target's weights are read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.runner.drafters import heads as draft_heads
from slipstream.runner.errors import DrafterError, ModelLoadError
from slipstream.runner.models.rotary import RotaryEmbedding
from slipstream.runner.startup import assembly as startup
from slipstream.runner.startup import load_target
from slipstream.speculators.registry import _SPECULATORS

from ...speculators.all_drafters import METHODS, Drafters

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
    """Raised where the target's weights would be read."""


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(load_target, "load_weights", load)
    monkeypatch.setattr(load_target, "check_outlines", lambda model, resolved: None)


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
            "must be ascending numbers from 0 to 8",
        ),
        (
            "eagle",
            TARGET | {"num_hidden_layers": 10**9},
            "has 1000000000 layers .* 64 and 1024 are",
        ),
        (
            "eagle3",
            TARGET | {"num_hidden_layers": 0},
            "num_hidden_layers is 0, but must be a positive integer",
        ),
        ("eagle3", TARGET | {"head_dim": 10**9}, "heads of size 1000000000"),
        (
            "eagle3",
            TARGET | {"draft_vocab_size": "61"},
            "draft_vocab_size is '61', but must be a positive integer",
        ),
        (
            "eagle3",
            TARGET | {"target_hidden_size": "32"},
            "target_hidden_size is '32', but must be",
        ),
        (
            "eagle",
            {"transformer_layer_config": 5},
            "transformer_layer_config is 5, but must be a JSON object",
        ),
        (
            "eagle3",
            TARGET | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [None, 3]}},
            r"eagle_aux_hidden_state_layer_ids is \[None, 3\], but must be a list of layer numbers",
        ),
        (
            "eagle",
            TARGET | {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "factor must be a number above 0, but its config says 'x'",
        ),
        ("draft_model", TARGET | {"vocab_size": 62}, "has 62 tokens, .* 61: .* share a tokenizer"),
        ("draft_model", TARGET | {"model_type": "gpt2", "architectures": ["G"]}, "not supported"),
        (
            "mtp",
            TARGET,
            "needs a DeepSeek V3, V3.2 or V4, GLM-4.5, Qwen3-Next or .* one is llama",
        ),
        ("gemma4_mtp", TARGET, "needs a gemma4_assistant checkpoint, but .* of type llama"),
    ],
)
def test_a_config_that_does_not_suit_the_target_is_refused(
    tmp_path: Path, method: str, config: dict[str, Any] | str, words: str
) -> None:
    with pytest.raises(DrafterError, match=words) as caught:
        start(tmp_path, method, folder(tmp_path / "drafter", config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_a_drafter_without_weights_is_refused_unless_they_are_random(
    tmp_path: Path, method: str
) -> None:
    drafter = folder(tmp_path / "drafter", TARGET, weights=False)
    with pytest.raises(ModelLoadError, match=r"drafter has no .safetensors files"):
        start(tmp_path, method, drafter)


def test_the_rotary_table_of_an_outline_takes_no_memory() -> None:
    meta = torch.device("meta")
    rotary = RotaryEmbedding({"rope_type": "default", "rope_theta": 1e4}, 64, 10**12, meta)
    assert rotary.cos_sin_cache.is_meta and rotary.cos_sin_cache.shape == (10**12, 64)


def test_every_method_with_a_model_is_checked() -> None:
    assert set(draft_heads._DRAFTERS) == set(_SPECULATORS) - {"ngram"}
    for kind in ("ngram", "no such"):
        with pytest.raises(ModelLoadError, match=f"unknown kind of draft model '{kind}'"):
            draft_heads.find_checkpoint(kind, SpeculativeConfig(kind), None, None)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def start_pair(target: Path, speculative: SpeculativeConfig) -> None:
    model = ModelConfig(model=str(target), device="cpu")
    startup.assemble(Config(model=model, speculative=speculative), lambda progress: None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_suits_is_loaded_after_the_target(
    drafters: Drafters, method: str, load_format: str
) -> None:
    with pytest.raises(Reached):
        start_pair(drafters.pair(method)[0], drafters.speculative(method, load_format=load_format))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("shape", r"tensor {name} of .* shape \[1, {rows}, .*, but the config requires \[{rows}, "),
        ("missing", "lacks tensors: .*{end}"),
        ("extra", "has unexpected tensors: .*odd"),
    ],
)
def test_tensors_that_do_not_fit_are_told_from_the_headers(
    drafters: Drafters, tmp_path: Path, method: str, damage: str, words: str
) -> None:
    target, drafter = drafters.pair(method)
    speculative = drafters.speculative(method)
    broken = Path(shutil.copytree(drafter or target, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    ends = "eh_proj.weight" if method == "mtp" else "mlp.down_proj.weight"
    name = next(name for name in tensors if name.endswith(ends))
    rows = len(tensors[name])
    if damage == "shape":
        tensors[name] = tensors[name][None]
    elif damage == "missing":
        del tensors[name]
    else:
        tensors[name.rpartition("proj.")[0] + "odd"] = torch.zeros(1)
    save_file(tensors, broken / "model.safetensors")
    if drafter is None:
        target = broken
    else:
        speculative = replace(speculative, model=str(broken))
    end = name.rpartition(".")[0].rpartition(".")[2]
    with pytest.raises(DrafterError, match=words.format(name=name, rows=rows, end=end)):
        start_pair(target, speculative)


def test_a_drafter_that_goes_while_the_target_is_read_is_the_drafters_fault(
    drafters: Drafters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = drafters.pair("eagle")
    assert drafter is not None
    gone = Path(shutil.copytree(drafter, tmp_path / "gone"))
    monkeypatch.setattr(load_target, "load_weights", lambda *_: shutil.rmtree(gone))
    with pytest.raises(DrafterError, match="gone"):
        start_pair(target, replace(drafters.speculative("eagle"), model=str(gone)))
