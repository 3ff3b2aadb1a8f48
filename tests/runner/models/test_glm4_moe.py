"""GLM-4.5 equals transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ..model_harness import assert_equals_transformers, load

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
    torch.manual_seed(1)
    config = transformers.Glm4MoeConfig(**{**SHAPE, **settings})
    config._attn_implementation = "eager"
    oracle = transformers.Glm4MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*oracle.named_parameters(), *oracle.named_buffers()):
            if "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
                tensor.copy_(tensor.half())  # a CPU keeps these weights as fp16
    oracle.save_pretrained(folder)
    return oracle


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
