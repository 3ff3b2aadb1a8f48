"""Qwen2-MoE and Qwen3-MoE equal transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.kernels.cpu import weight as native
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
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=64,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3_plain_weights": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": False}),
    "qwen3_every_second_layer": ("Qwen3Moe", {"head_dim": 16, "decoder_sparse_step": 2}),
    "qwen3_dense_first_layer": ("Qwen3Moe", {"head_dim": 16, "mlp_only_layers": [0]}),
    "qwen2": ("Qwen2Moe", {"shared_expert_intermediate_size": 40}),
    "qwen2_window": (
        "Qwen2Moe",
        {
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
}


def make_oracle(family: str, settings: dict[str, Any], folder: Path) -> Any:
    return random_oracle(family, {**SHAPE, **settings}, folder)


def restack(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Replace the matrices of each expert by stacked tensors."""
    for layer in range(SHAPE["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{path}.{e}.{part}_proj.weight") for e in range(8)]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{path}.gate_up_proj"] = torch.stack(both)
        tensors[f"{path}.down_proj"] = torch.stack(parts["down"])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
def test_native_weights_beside_experts(tmp_path: Path) -> None:
    oracle = make_oracle(*CASES["qwen2"], tmp_path)
    assert_equals_transformers(load(tmp_path, "auto"), oracle)


def test_a_checkpoint_may_hold_stacked_experts(tmp_path: Path) -> None:
    oracle = make_oracle(*CASES["qwen3"], tmp_path)
    restack(tmp_path, stack_experts)
    assert_equals_transformers(load(tmp_path), oracle)


def test_incomplete_and_doubled_experts_are_refused(tmp_path: Path) -> None:
    make_oracle(*CASES["qwen3"], tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    restack(tmp_path, lambda stored: stored.pop(name))
    with pytest.raises(ModelLoadError, match=rf"lacks tensors: {name}\."):
        load(tmp_path)
    restack(tmp_path, lambda stored: stored.update({name: tensors[name]}))
    stacked = stack_experts(tensors) or {
        name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts" in name
    }
    restack(tmp_path, lambda stored: stored.update(stacked))
    with pytest.raises(ModelLoadError, match="has tensors of a second form: model.layers.1.mlp"):
        load(tmp_path)


def test_more_experts_of_a_token_than_there_are_are_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**{**SHAPE, "num_experts_per_tok": 9})
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="each token has 9 experts of 8"):
        load(tmp_path, load_format="dummy")
