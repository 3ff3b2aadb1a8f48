"""Gemma 3 and Gemma 4 language models equal transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.kernels.cpu import weight as native
from slipstream.runner.errors import ModelLoadError

from ..model_harness import Sequences, assert_equals_transformers, load
from ..random_oracle import random_oracle

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    sliding_window=6,
)
ALTERNATING = ["sliding_attention", "full_attention"] * 3
PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
NO_PLE = {"hidden_size_per_layer_input": 0}
GEMMA3: dict[str, dict[str, Any]] = {
    "plain": {"query_pre_attn_scalar": 24},
    "linear_rope_on_full_layers": {
        "layer_types": ALTERNATING,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "untied_capped": {"tie_word_embeddings": False, "final_logit_softcapping": 3.0},
}
GEMMA4: dict[str, dict[str, Any]] = {
    "two_head_sizes": {**NO_PLE, "global_head_dim": 32, "final_logit_softcapping": 3.0},
    "per_layer_embeddings": {**PER_LAYER, "global_head_dim": 32},
    "shared_kv": {
        **PER_LAYER,
        "global_head_dim": 32,
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "values_are_keys": {
        **NO_PLE,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "experts": {
        **NO_PLE,
        "global_head_dim": 24,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
}


def make_oracle(family: str, settings: dict[str, Any], folder: Path) -> Any:
    return random_oracle(family, {**SHAPE, **settings}, folder, "TextConfig")


@pytest.mark.parametrize("case", GEMMA3)
def test_gemma3_equals_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle("Gemma3", GEMMA3[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("case", GEMMA3)
def test_native_gemma3_equals_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle("Gemma3", GEMMA3[case], tmp_path)
    model = load(tmp_path, "auto")
    assert_equals_transformers(model, oracle)
    assert model.decoder.runs(Sequences(model, 1, 8).attention([0], [1])[0])


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("case", GEMMA4)
def test_gemma4_with_native_projections_equals_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle("Gemma4", GEMMA4[case], tmp_path)
    assert_equals_transformers(load(tmp_path, "auto"), oracle)


@pytest.mark.parametrize("case", GEMMA4)
def test_gemma4_equals_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle("Gemma4", GEMMA4[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


def test_gemma4_kv_groups_follow_head_size_and_window(tmp_path: Path) -> None:
    make_oracle("Gemma4", GEMMA4["shared_kv"], tmp_path)
    sequences = Sequences(load(tmp_path), 1, 8)
    sliding, full = sequences.groups
    assert (sliding.head_dim, sliding.sliding_window) == (16, 6)
    assert (full.head_dim, full.sliding_window) == (32, None)
    assert [layer.kv_source for layer in sliding.layers] == [None, None, 2]
    assert [layer.kv_source for layer in full.layers] == [None, 1, 1]
    assert sequences.cache.kv_caches[5] is sequences.cache.kv_caches[1]


@pytest.mark.parametrize("family", ["Gemma3", "Gemma4"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_part_of_a_multimodal_checkpoint(
    family: str, prefix: str, tmp_path: Path
) -> None:
    settings = GEMMA3["plain"] if family == "Gemma3" else GEMMA4["shared_kv"]
    make_oracle(family, settings, tmp_path)
    expected = Sequences(load(tmp_path), 1, 8).step([(0, [4, 5, 6])])[0][0]
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", prefix, 1): t for name, t in load_file(path).items()}
    tensors["model.vision_tower.encoder.weight"] = torch.ones(3)
    if family == "Gemma4":  # checkpoints keep unused weights of layers that share their cache
        tensors[f"{prefix}layers.5.self_attn.k_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, path)
    assert torch.equal(Sequences(load(tmp_path), 1, 8).step([(0, [4, 5, 6])])[0][0], expected)


def test_unsupported_configs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    make_oracle("Gemma3", {"hidden_activation": "relu"}, tmp_path)
    with pytest.raises(ModelLoadError, match="activation 'relu' is not supported"):
        load(tmp_path)
