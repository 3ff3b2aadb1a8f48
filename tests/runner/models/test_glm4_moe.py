"""GLM-4.5 equals transformers on tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.runner.errors import ModelLoadError

from ..model_harness import assert_equals_transformers, load
from ..random_oracle import random_oracle

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
    max_position_embeddings=64,
    num_nextn_predict_layers=0,
)
CASES: dict[str, dict[str, Any]] = {
    "glm_4_5": {"use_qk_norm": True, "attention_bias": True},
    "glm_4_5_air": {"use_qk_norm": False, "attention_bias": True, "n_shared_experts": 2},
    "grouped": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "experts_in_every_layer": {"first_k_dense_replace": 0},
}


def make_oracle(settings: dict[str, Any], folder: Path) -> Any:
    return random_oracle("Glm4Moe", {**SHAPE, **settings}, folder)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


def test_half_of_each_head_rotates_and_the_prediction_module_is_left_out(tmp_path: Path) -> None:
    oracle = make_oracle(CASES["glm_4_5"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, path, {"format": "pt"})
    model = load(tmp_path)
    assert model.rotary.cos_sin_cache.shape[1] == 8
    assert_equals_transformers(model, oracle)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_group": 3},  # does not divide 8 experts
        {"n_group": -2},
        {"n_group": 4, "topk_group": 5},
        {"n_group": 4, "topk_group": 1},  # two experts, but a token has three
        {"n_group": 8, "topk_group": 4},  # groups of one have no best two
    ],
)
def test_groups_that_cannot_be_chosen_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    make_oracle({}, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    refusal = "the model has 8 experts; check n_group|n_group must be an integer from 0"
    with pytest.raises(ModelLoadError, match=refusal):
        load(tmp_path)
