"""Configs read without transformers equal those that transformers makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from slipstream.runner.loading.plain_config import plain_config
from slipstream.runner.loading.weights import make_hf_config
from slipstream.runner.models.llama import _sliding_window, _traits
from slipstream.runner.models.rotary import inverse_frequencies, rope_parameters

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
    "original_max_position_embeddings": 1024,
}  # fmt: skip
PLAIN = [
    LLAMA,
    LLAMA | {"rope_scaling": LLAMA3, "head_dim": 64, "attention_bias": True},
    LLAMA | {"rope_scaling": None, "tie_word_embeddings": True, "mlp_bias": True},
    LLAMA | {"model_type": "mistral", "sliding_window": 512},
    LLAMA | {"model_type": "mistral", "sliding_window": None, "head_dim": 48},
    LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32},
    LLAMA | {"model_type": "qwen3", "use_sliding_window": False, "head_dim": 64},
]
THETA = {"rope_type": "default", "rope_theta": 500000.0}
SAVED = [  # by transformers 5
    {},
    {"rope_parameters": {**LLAMA3, "rope_theta": 300000.0}, "eos_token_id": None},
    {"model_type": "mistral", "sliding_window": 512},
    {"model_type": "qwen2", "use_sliding_window": False},
    {"model_type": "qwen3", "use_sliding_window": False, "head_dim": 64, "eos_token_id": None},
]
NAMES = [name for name in LLAMA if name not in ("torch_dtype", "rope_theta")]


@pytest.mark.parametrize("raw", PLAIN, ids=lambda raw: raw["model_type"])
def test_a_plain_config_is_what_transformers_makes_of_it(raw: dict[str, Any]) -> None:
    ours, theirs = plain_config(raw), CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    _are_equal(ours, theirs)


@pytest.mark.parametrize("change", SAVED, ids=str)
def test_what_transformers_saves_is_plain(change: dict[str, Any], tmp_path: Path) -> None:
    """It writes rope_parameters, null for what is not set, and the kind of each layer."""
    raw = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    raw = raw | {"rope_parameters": THETA} | change
    theirs = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_parameters"] and "rope_theta" not in saved
    _are_equal(plain_config(saved), theirs)


def _are_equal(ours: Any, theirs: Any) -> None:
    assert ours is not None
    for name in NAMES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype).removeprefix("torch.")
    assert _traits(ours) == _traits(theirs)
    for layer in range(3):
        assert _sliding_window(ours, layer) == _sliding_window(theirs, layer)
    dims = [getattr(c, "head_dim", None) or c.hidden_size // 4 for c in (ours, theirs)]
    assert dims[0] == dims[1]
    mine, exact = (inverse_frequencies(rope_parameters(c), dims[0]) for c in (ours, theirs))
    assert torch.equal(mine[0], exact[0]) and mine[1] == exact[1]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "mistral"},  # its window is not stated
        {"model_type": "qwen3", "use_sliding_window": False},  # nor is the size of its heads
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        {"num_attention_heads": 3},
        {"vocab_size": "512"},
        {"num_hidden_layers": True},
        {"tie_word_embeddings": None},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": []},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # rope_theta says more
        {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"rope_theta": None, "rope_parameters": [1e4]},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_whatever_is_not_plain_or_not_stated_is_left_to_transformers(
    change: dict[str, Any],
) -> None:
    assert plain_config(LLAMA | change) is None


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "num_key_value_heads"])
def test_a_value_that_is_missing_is_left_to_transformers(name: str) -> None:
    assert plain_config({key: value for key, value in LLAMA.items() if key != name}) is None


def test_a_draft_head_needs_no_end_of_text() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert plain_config(without) is None
    assert plain_config(without, needs_eos=False) is not None


def test_a_plain_config_is_read_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is an error
    assert make_hf_config(LLAMA, "here").hidden_size == 128
