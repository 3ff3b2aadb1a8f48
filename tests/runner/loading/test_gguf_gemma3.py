"""GGUF files of Gemma 3: the settings that the header implies, names, and norm weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from slipstream.configs.schema import ModelConfig
from slipstream.runner.loading.gguf_families import gemma3_settings
from slipstream.runner.loading.weights import resolve_model

from ..model_harness import Sequences, load
from ..random_oracle import random_oracle

LAYERS, HIDDEN, HEADS, HEAD_DIM, WINDOW = 7, 64, 4, 32, 5
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def make_oracle() -> Any:
    shape = dict(
        vocab_size=90, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD_DIM,
        max_position_embeddings=128, sliding_window=WINDOW, query_pre_attn_scalar=HEAD_DIM,
    )  # fmt: skip
    return random_oracle("Gemma3", shape, None, "TextConfig", seed=4)


def write_gguf(path: Path, oracle: Any, kinds: list[str]) -> None:
    """As llama.cpp's converter writes it; matrices take turns in `kinds`, and the oracle gets the
    rounded values."""
    config = oracle.config
    writer = GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(WINDOW)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(1)
    for number, (name, value) in enumerate(sorted(oracle.state_dict().items())):
        if name == "lm_head.weight":
            continue
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), (value + 1).numpy())
            continue
        kind = GGMLQuantizationType[kinds[number % len(kinds)]]
        quantised = quantize(value.numpy(), kind)
        writer.add_tensor(gguf_name(name), quantised, raw_dtype=kind)
        value.copy_(torch.from_numpy(np.array(dequantize(quantised, kind))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_gemma3_file_equals_transformers(dtype: str, tmp_path: Path) -> None:
    oracle, path = make_oracle(), tmp_path / "model.gguf"
    write_gguf(path, oracle, ["Q8_0", "Q5_0", "F16", "Q4_1"])
    assert resolve_model(ModelConfig(str(path))).hf_config.sliding_window == WINDOW
    ids = torch.randint(0, 90, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    sequences = Sequences(load(path, dtype), 1, 32)
    got = torch.cat(
        [sequences.step([(0, part)])[0][0] for part in (ids[:19], ids[19:20], ids[20:])]
    )
    tolerance = 1e-4 if dtype == "float32" else 2e-3
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_the_largest_size_scales_queries_by_its_hidden_size() -> None:
    header = {"rope.freq_base_swa": 5000.0}
    config: dict[str, Any] = {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "hidden_size": 5376,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    implied = gemma3_settings(config, lambda key, default: header.get(key, default))
    assert implied["query_pre_attn_scalar"] == 168
    assert implied["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert implied["rope_parameters"]["sliding_attention"]["rope_theta"] == 5000.0
    assert [n for n, kind in enumerate(implied["layer_types"]) if kind == "full_attention"] == [
        *range(5, 62, 6)
    ]
