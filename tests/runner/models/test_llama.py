"""The Llama family equals transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.kernels.cpu import weight as native
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

from ..model_harness import CPU, Sequences, assert_equals_transformers, load
from ..random_oracle import random_oracle

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama2_no_gqa": ("Llama", {"num_key_value_heads": 4}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear_rope": ("Llama", {"rope_parameters": LINEAR}),
    "yarn_rope": ("Llama", {"rope_parameters": YARN}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "mistral_window": ("Mistral", {"sliding_window": 6, "head_dim": 24}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window_on_upper_layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_oracle(family: str, settings: dict[str, Any], folder: Path) -> Any:
    return random_oracle(family, {**SHAPE, **settings}, folder)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("case", CASES)
def test_native_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    model = load(tmp_path, "auto")
    assert_equals_transformers(model, oracle)
    state = Sequences(model, 1, 8).attention([0], [1])[0]
    # heads whose size is no multiple of 16 are left to torch
    assert model.decoder.runs(state) == (model.attention_layers()[0].head_dim % 16 == 0)


def test_aux_states_are_the_stream_at_layer_boundaries(tmp_path: Path) -> None:
    oracle = make_oracle("Llama", {}, tmp_path)
    ids = [5, 3, 90, 41, 7]
    _, aux = Sequences(load(tmp_path), 1, 8).step([(0, ids)], aux_boundaries=(0, 1, 3))
    streams: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))
        for layer in oracle.model.layers
    ]
    hooks.append(oracle.model.norm.register_forward_pre_hook(lambda _, a: streams.append(a[0][0])))
    with torch.no_grad():
        oracle(torch.tensor([ids]))
    assert len(hooks) == len(streams) == 4 and len(aux) == 3
    for boundary, stream in zip((0, 1, 3), aux, strict=True):
        torch.testing.assert_close(stream, streams[boundary], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_reduced_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    oracle = make_oracle("Qwen2", {"tie_word_embeddings": True}, tmp_path)
    ids = list(range(3, 23))
    got = Sequences(load(tmp_path, dtype), 1, 24).step([(0, ids)])[0][0].float()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_layer_id_offset_moves_every_attention_layer(tmp_path: Path) -> None:
    make_oracle("Llama", {}, tmp_path)
    config = load(tmp_path).config
    model = build_model(config, WeightFormat(CPU, torch.float32), layer_id_offset=10)
    assert [layer.layer_id for layer in model.attention_layers()] == [10, 11, 12]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "DeepseekV3"])
def test_activations_other_than_silu_are_refused(family: str) -> None:
    for name, is_served in (("gelu", False), ("swish", True)):
        shape = {**SHAPE, "hidden_act": name, "architectures": [f"{family}ForCausalLM"]}
        config = getattr(transformers, f"{family}Config")(**shape)
        if is_served:
            build_model(config, WeightFormat(torch.device("meta"), torch.float32))
            continue
        with pytest.raises(ModelLoadError, match="activation 'gelu' is not supported"):
            build_model(config, WeightFormat(torch.device("meta"), torch.float32))
