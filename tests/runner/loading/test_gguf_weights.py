"""GGUF files: the config from metadata, dequantised weights, undone rotary pairs and names."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.gguf_weights import GGUFFile
from slipstream.runner.loading.quantised.delivery import widened
from slipstream.runner.loading.weights import resolve_model
from slipstream.runner.models.formats.expert_stack import ExpertStack

from ..model_harness import Sequences, load
from ..random_oracle import random_oracle

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 4, 2, 2, 70
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Do as converters to GGUF do with llama's q and k rows: interleave the halves of each head."""
    half = weight.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(heads)
        for i in range(half)
        for part in range(2)
    ]
    return weight[order]


def stored_parts(oracle: Any) -> list[tuple[str, Tensor]]:
    """The weights as a GGUF file has them, as views: of experts, gate and up are two tensors."""
    parts = []
    for name, value in sorted(oracle.state_dict().items()):
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            gate, up = value.chunk(2, 1)
            parts += [(f"{stem}.gate_proj.weight", gate), (f"{stem}.up_proj.weight", up)]
        elif stem.endswith(".experts"):
            parts.append((f"{name}.weight", value))
        else:
            parts.append((name, value[0] if "shared_expert_gate" in name else value))
    return parts


def write_gguf(
    path: Path, arch: str, oracle: Any, kinds: list[str], divisors: Tensor | None = None
) -> None:
    """A GGUF file whose matrices take turns in `kinds`; the oracle gets the rounded values."""
    config = oracle.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("qwen3", "qwen3moe"):
        writer.add_key_length(config.head_dim)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.rope_parameters["rope_type"] == "yarn":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            config.rope_parameters["original_max_position_embeddings"]
        )
    writer.add_token_list([f"t{i}" for i in range(2000)])  # long: stepped over, not parsed
    writer.add_token_types([1] * 2000)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    for number, (name, value) in enumerate(stored_parts(oracle)):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = value
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = interleave(value, HEADS if "q_proj" in name else KV_HEADS)
        if value.ndim == 1 or "mlp.gate.weight" in name or kinds[number % len(kinds)] == "F32":
            writer.add_tensor(gguf_name(name), stored.numpy())
            continue
        kind = GGMLQuantizationType[kinds[number % len(kinds)]]
        quantised = quantize(stored.contiguous().numpy(), kind)
        writer.add_tensor(gguf_name(name), quantised, raw_dtype=kind)
        rounded = torch.from_numpy(np.array(dequantize(quantised, kind)))
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            rounded = rounded[interleave(torch.arange(len(rounded)), heads).argsort()]
        value.copy_(rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_oracle(family: str, **settings: Any) -> Any:
    shape = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128,
    )  # fmt: skip
    return random_oracle(family, {**shape, **settings}, seed=2)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}


@pytest.mark.parametrize("dtype", ["float32", "auto", "packed"])
@pytest.mark.parametrize(
    ("arch", "family", "settings"),
    [
        ("llama", "Llama", {"tie_word_embeddings": True}),
        ("llama", "Llama", {"rope_parameters": YARN}),
        ("qwen2", "Qwen2", {}),
        ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen3moe", "Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
        ("qwen2moe", "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    ],
)
def test_a_gguf_model_equals_transformers(
    arch: str, family: str, settings: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    oracle = make_oracle(family, **settings)
    path = tmp_path / "model.gguf"
    kinds = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
    write_gguf(path, arch, oracle, kinds)
    ids = [1, 60, 33, 8, 8, 25]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    packed = dtype == "packed"
    model = load(path, "float32" if packed else dtype, packed)
    got = Sequences(model, 1, 8).step([(0, ids)])[0][0]
    # natively, activations are rounded to 15 bits
    tolerance = 1e-3 if dtype == "auto" else 1e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert resolve_model(ModelConfig(model=str(path))).eos_token_ids == [3, 5]
    assert resolve_model(ModelConfig(model=str(path))).hf_config.eos_token_id == [3, 5]
    file = GGUFFile(path)
    outlines = {name: tensor.shape for name, tensor in file.outlines()}
    counted: Counter[str] = Counter()

    def count(name: str, num_bytes: int) -> None:
        counted[name] += num_bytes

    assert outlines == {name: tensor.shape for name, tensor in file.tensors(count)}
    assert counted == file.sizes()


def test_rope_divisors_are_llama3_scaling(tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    oracle = make_oracle("Llama", rope_parameters=scaled)
    plain = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    divisors = plain / oracle.model.rotary_emb.inv_freq
    assert divisors.max() > 4
    write_gguf(tmp_path / "m.gguf", "llama", oracle, ["F32"], divisors)
    ids = list(range(40))
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    got = Sequences(load(tmp_path / "m.gguf"), 1, 64).step([(0, ids)])[0][0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
def test_experts_stay_in_the_format_of_the_file(kind: str, tmp_path: Path) -> None:
    oracle = make_oracle("Qwen3Moe", **EXPERTS, head_dim=32, norm_topk_prob=True)
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3moe", oracle, [kind])
    ids = [1, 60, 33, 8, 8, 25]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    for dtype, packed in (("float32", True), ("auto", False)):
        model = load(path, dtype, packed)
        got = Sequences(model, 1, 8).step([(0, ids)])[0][0]
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        for stack in model.modules():
            if isinstance(stack, ExpertStack):
                assert (stack.packed is not None) == packed
                is_native = model.format.native and kind != "MXFP4"
                assert stack.native_formats == ({kind} if is_native else set())
    for name in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        data = path.read_bytes().replace(name.encode(), b"x" * len(name))
        (tmp_path / "without.gguf").write_bytes(data)
        with pytest.raises(ModelLoadError, match=f"its header has no {name}"):
            load(tmp_path / "without.gguf")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_1", "Q5_0", "Q8_0", "MXFP4"])
def test_every_form_dequantises_as_the_gguf_package_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runner.loading.gguf_values._PIECE", 100)  # several pieces
    quantisation = GGMLQuantizationType[kind]
    from gguf.constants import GGML_QUANT_SIZES

    per_block, block_bytes = GGML_QUANT_SIZES[quantisation]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 50, (48, 512 // per_block * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_head_count(2)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [(name, rows)] = GGUFFile(tmp_path / "k.gguf").tensors()
    tensor = widened(rows)
    assert name == "model.layers.0.mlp.up_proj.weight"
    expected = torch.from_numpy(np.array(dequantize(raw, quantisation)))
    assert tensor.shape == (48, 512) and torch.equal(tensor, expected)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelLoadError, match="'mamba' is not supported; supported: deepseek2, gemma3"
    ):
        load(tmp_path / "x.gguf")


def test_a_plain_header_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_oracle("Llama"), ["F32"])
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is an error
    config = resolve_model(ModelConfig(str(tmp_path / "m.gguf"))).hf_config
    assert config.model_type == "llama"


def test_a_file_that_was_read_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(4)
    rows = (np.arange(1 << 20) % 1000).reshape(1024, 1024)
    writer.add_tensor("blk.0.ffn_up.weight", rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def resident() -> int:
        """KiB of the file in this process's memory."""
        lines = Path("/proc/self/smaps").read_text().split(str(path), 1)
        return int(lines[1].split("Rss:", 1)[1].split()[0]) if len(lines) > 1 else 0

    file = GGUFFile(path)
    [(_, stored)] = file.tensors()
    values = widened(stored)
    assert resident() >= 2048
    file.release()
    assert resident() < 256
    assert torch.equal(widened(stored), values)  # it can be read again
