"""GGUF files of gpt-oss and DeepSeek equal transformers' models with the same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.gguf_families import expert_names
from slipstream.runner.loading.gguf_weights import GGUFFile
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.weight_format import (
    WeightFormat,
    resolve_format,
    split_format,
)
from slipstream.runner.models.registry import build_model
from slipstream.runner.parallel.ranks import Ranks

from ..model_harness import CPU, Sequences, load
from ..models.test_deepseek import SHAPE as DEEPSEEK
from ..models.test_gpt_oss import SHAPE as GPT_OSS
from ..parallel.threads import on_ranks
from ..random_oracle import random_oracle

IDS = [1, 60, 33, 8, 8, 25, 7, 90, 12, 4]
# module in transformers -> tensor of a block
GPT_OSS_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.router": "ffn_gate_inp",
}
DEEPSEEK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Writer(GGUFWriter):  # type: ignore[misc]
    """Writes tensors. Numbers that it rounds go back to the views that they come from."""

    without = ""  # a tensor that is left out

    def add(self, name: str, view: Tensor, kind: str = "F32") -> None:
        if name == self.without:
            return
        if kind == "F32":
            self.add_tensor(name, view.contiguous().numpy())
            return
        stored = GGMLQuantizationType[kind]
        data = quantize(view.contiguous().numpy(), stored)
        self.add_tensor(name, data, raw_dtype=stored)
        view.copy_(torch.from_numpy(np.array(dequantize(data, stored))).view(view.shape))

    def finish(self) -> None:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def start(path: Path, arch: str, config: Any, experts: int) -> Writer:
    """A file with the numbers that both architectures have."""
    writer = Writer(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_eos_token_id(3)
    return writer


def plain_name(name: str, names: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{suffix}"


def block_of(name: str) -> str:
    return f"blk.{name.split('.')[2]}"


def write_gpt_oss(path: Path, kind: str) -> Any:
    """A file whose experts have the type `kind`; returns the model with the rounded numbers."""
    oracle = random_oracle("GptOss", GPT_OSS, seed=4)
    config = oracle.config
    writer = start(path, "gpt-oss", config, config.num_local_experts)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    for name, value in sorted(oracle.state_dict().items()):
        leaf, experts = name.rpartition(".")[2], f"{block_of(name)}.ffn_" if "mlp" in name else ""
        if leaf == "sinks":
            writer.add(f"{block_of(name)}.attn_sinks.weight", value)
        elif leaf == "gate_up_proj":  # [E, H, 2 I], gates and ups take turns
            writer.add(f"{experts}gate_exps.weight", value[..., ::2].transpose(1, 2), kind)
            writer.add(f"{experts}up_exps.weight", value[..., 1::2].transpose(1, 2), kind)
        elif leaf == "gate_up_proj_bias":
            writer.add(f"{experts}gate_exps.bias", value[:, ::2])
            writer.add(f"{experts}up_exps.bias", value[:, 1::2])
        elif leaf == "down_proj":
            writer.add(f"{experts}down_exps.weight", value.transpose(1, 2), kind)
        elif leaf == "down_proj_bias":
            writer.add(f"{experts}down_exps.bias", value)
        else:
            is_matrix = value.ndim == 2 and "router" not in name
            writer.add(plain_name(name, GPT_OSS_NAMES), value, "Q8_0" if is_matrix else "F32")
    writer.finish()
    return oracle


def write_deepseek(path: Path, family: str, halves: bool, **settings: Any) -> Any:
    """A file of DeepSeek V2 or V3, with `halves` as files for absorbed attention are."""
    is_v3 = family == "DeepseekV3"
    # rows of whole blocks of 32 numbers
    shape = {**DEEPSEEK, "q_lora_rank": 64, "moe_intermediate_size": 32, "v_head_dim": 32}
    own = {"num_mtp_layers": 0} if is_v3 else {}
    oracle = random_oracle(family, {**shape, **own, **settings}, seed=4)
    config = oracle.config
    nope, rope, value_size = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    writer = start(path, "deepseek2", config, config.n_routed_experts)
    if halves:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + rope)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(value_size)
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(nope + rope)
        writer.add_value_length(value_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if is_v3:
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_uint32("deepseek2.expert_gating_func", 2)
    if is_v3 or config.topk_method != "greedy":
        writer.add_uint32("deepseek2.expert_group_count", config.n_group)
        writer.add_uint32("deepseek2.expert_group_used_count", config.topk_group)
    if (all_dim := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)
    for name, value in sorted(oracle.state_dict().items()):
        leaf = name.rpartition(".")[2]
        if leaf == "gate_up_proj":
            gate, up = value.chunk(2, 1)
            writer.add(f"{block_of(name)}.ffn_gate_exps.weight", gate, "Q8_0")
            writer.add(f"{block_of(name)}.ffn_up_exps.weight", up, "Q8_0")
        elif name.endswith("experts.down_proj"):
            writer.add(f"{block_of(name)}.ffn_down_exps.weight", value, "Q4_0")
        elif leaf == "e_score_correction_bias":
            writer.add(f"{block_of(name)}.exp_probs_b.bias", value)
        elif halves and "kv_b_proj" in name:
            heads = value.view(config.num_attention_heads, -1, config.kv_lora_rank)
            key = heads[:, :nope].transpose(1, 2)
            writer.add(f"{block_of(name)}.attn_k_b.weight", key, "Q8_0" if nope == 32 else "F32")
            writer.add(f"{block_of(name)}.attn_v_b.weight", heads[:, nope:], "Q8_0")
        else:
            is_matrix = value.ndim == 2 and "mlp.gate.weight" not in name
            writer.add(plain_name(name, DEEPSEEK_NAMES), value, "Q8_0" if is_matrix else "F32")
    writer.finish()
    return oracle


def expect_equal(path: Path, oracle: Any, dtype: str = "float32", packed: bool = False) -> Any:
    """Check logits, and what the file says of itself; returns the model."""
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS])).logits[0]
    model = load(path, dtype, packed)
    got = Sequences(model, 1, 16).step([(0, IDS)])[0][0]
    tolerance = 3e-3 if dtype == "auto" else 3e-4
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    file, counted = GGUFFile(path), Counter[str]()

    def count(name: str, num_bytes: int) -> None:
        counted[name] += num_bytes

    outlines = {name: tensor.shape for name, tensor in file.outlines()}
    assert outlines == {name: tensor.shape for name, tensor in file.tensors(count)}
    assert counted == file.sizes()
    return model


@pytest.mark.parametrize("form", ["float32", "auto", "packed"])
def test_gpt_oss_equals_transformers(form: str, tmp_path: Path) -> None:
    path, packed = tmp_path / "model.gguf", form == "packed"
    oracle = write_gpt_oss(path, "MXFP4")
    model = expect_equal(path, oracle, "float32" if packed else form, packed)
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    assert len(stacks) == 2 * GPT_OSS["num_hidden_layers"]
    for stack in stacks:
        assert (stack.packed is not None) == packed
        if stack.packed is not None:
            assert stack.packed.weight.kind == "fp4"


def test_two_ranks_share_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_gpt_oss(path, "MXFP4")
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS])).logits[0]
    resolved = resolve_model(ModelConfig(model=str(path)))

    def run(ranks: Ranks) -> Tensor:
        fmt = split_format(resolve_format("float32", CPU, None), ranks)
        model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32, ranks=fmt.ranks))
        load_weights(model, replace(resolved, opened=GGUFFile(path)))
        return Sequences(model, 1, 16).step([(0, IDS)])[0][0]

    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=3e-4)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
DEEPSEEKS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "v3": ("DeepseekV3", True, {"rope_parameters": YARN}),
    "v3 with quantised halves": ("DeepseekV3", True, {"qk_nope_head_dim": 32}),
    "v3 as one": ("DeepseekV3", False, {"norm_topk_prob": False}),
    "v2": ("DeepseekV2", True, {"topk_method": "group_limited_greedy"}),
    "v2 lite": ("DeepseekV2", False, {"topk_method": "greedy", "q_lora_rank": None}),
}


@pytest.mark.parametrize("case", DEEPSEEKS)
def test_deepseek_equals_transformers(case: str, tmp_path: Path) -> None:
    family, halves, settings = DEEPSEEKS[case]
    oracle = write_deepseek(tmp_path / "model.gguf", family, halves, **settings)
    expect_equal(tmp_path / "model.gguf", oracle)
    if case == "v3":
        model = expect_equal(tmp_path / "model.gguf", oracle, packed=True)
        kept = [m for m in model.modules() if isinstance(m, ExpertStack) and m.packed is not None]
        assert kept and {stack.packed.weight.kind for stack in kept} == {"int8", "int4"}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rope.dimension_count", 24, "heads of 24 numbers cannot have 24 that are rotated"),
        ("expert_group_count", "x", "expert_group_count must be a whole number"),
        ("attention.kv_lora_rank", 1 << 30, "kv_lora_rank must be an integer from 0 to"),
    ],
)
def test_numbers_that_make_no_sense_are_named(
    key: str, value: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_deepseek(path, "DeepseekV3", True)
    file = GGUFFile(path)
    setting = file._setting
    monkeypatch.setattr(
        file, "_setting", lambda name, *default: value if name == key else setting(name, *default)
    )
    with pytest.raises(ModelLoadError, match=reason):
        file.config()


def test_a_stack_without_numbers_has_no_experts() -> None:
    name = "blk.0.ffn_down_exps.weight"
    assert len(list(expert_names(name, (4, 8, 32)))) == 4
    for shape in ((4, 0, 32), (4, 8, 0), (0, 8, 32), (1 << 20, 8, 32), (4, 8)):
        assert not list(expert_names(name, shape))


@pytest.mark.parametrize(
    ("half", "reason"), [("v", r"lacks tensors: blk\.1\.attn_v_b\.weight"), ("k", "unexpected")]
)
def test_a_missing_half_is_named(
    half: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "without", f"blk.1.attn_{half}_b.weight")
    write_deepseek(tmp_path / "model.gguf", "DeepseekV3", True)
    with pytest.raises(ModelLoadError, match=reason):
        load(tmp_path / "model.gguf")
