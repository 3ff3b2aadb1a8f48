"""DeepSeek V2 and V3 equal transformers, whose attention is not absorbed, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..model_harness import Sequences, assert_equals_transformers, load
from ..random_oracle import random_oracle

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    max_position_embeddings=64,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_greedy": ("DeepseekV2", {"topk_method": "greedy"}),
    "v2_group_limited": ("DeepseekV2", {"topk_method": "group_limited_greedy"}),
    "v2_lite_without_q_lora": (
        "DeepseekV2",
        {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN},
    ),
    "v3": ("DeepseekV3", {}),
    "v3_yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "v3_plain_weights": ("DeepseekV3", {"norm_topk_prob": False, "rope_interleave": False}),
    "v3_biased_attention": ("DeepseekV3", {"attention_bias": True, "first_k_dense_replace": 0}),
}


def make_oracle(family: str, settings: dict[str, Any], folder: Path) -> Any:
    own = {"num_mtp_layers": 0} if family == "DeepseekV3" else {}
    return random_oracle(family, {**SHAPE, **own, **settings}, folder)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


def test_the_cache_holds_one_row_per_token(tmp_path: Path) -> None:
    make_oracle("DeepseekV3", {}, tmp_path)
    model = load(tmp_path)
    sequences = Sequences(model, 1, 8)
    assert len(sequences.groups) == 1 and sequences.groups[0].is_mla
    assert sequences.cache.kv_caches[0].shape[-2:] == (1, 32 + 8)
    assert model.attention_layers()[0].scale == pytest.approx(24**-0.5)


def test_multi_token_prediction_layers_are_left_to_the_drafter(tmp_path: Path) -> None:
    make_oracle("DeepseekV3", {}, tmp_path)
    expected = Sequences(load(tmp_path), 1, 8).step([(0, [4, 5])])[0][0]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(Sequences(load(tmp_path), 1, 8).step([(0, [4, 5])])[0][0], expected)
