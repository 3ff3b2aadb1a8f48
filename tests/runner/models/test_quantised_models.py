"""Models with quantised checkpoints equal transformers' models with the same numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.kernels.quant.tiled import TiledWeight
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.packed import PackedLayer
from slipstream.runner.models.layers import Linear

from ...cases import some
from ..loading.quantised.quantised_folder import edit_config, quantise
from ..loading.quantised.stored_formats import FORMATS
from ..model_harness import Sequences, assert_equals_transformers, load

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"attention_bias": True}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": True}),
    "Qwen3Moe": (
        "Qwen3MoeConfig",
        dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    ),
    "DeepseekV3": (
        "DeepseekV3Config",
        dict(
            moe_intermediate_size=32,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            head_dim=8,
            v_head_dim=16,
            n_group=2,
            topk_group=1,
            num_mtp_layers=0,
        ),
    ),
}
CASES = [(family, name) for name in FORMATS for family in FAMILIES]
FEW = [
    *(("Llama", name) for name in ("fp8 tensor", "int4 zeros", "gptq order", "nvfp4")),
    *(("Qwen3", name) for name in ("fp8 channel", "int8 channel", "awq")),
    *(("Gemma3", name) for name in ("int4 groups", "mxfp4")),
    *(("Qwen3Moe", name) for name in ("fp8 blocks", "int4 zeros", "gptq")),
    *(("DeepseekV3", name) for name in ("fp8 channel", "int4 order")),
]


def make(family: str, name: str, folder: Path) -> Any:
    """Save a random model with matrices of this format, and return transformers' model of it."""
    torch.manual_seed(1)
    config_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SHAPE, **settings})
    config._attn_implementation = "eager"
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in oracle.named_parameters():
            if "_proj" not in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
                parameter.copy_(parameter.half())
    oracle.save_pretrained(folder)
    numbers = quantise(folder, name)
    plain = folder / "plain"
    plain.mkdir()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(plain)
    oracle = type(oracle).from_pretrained(plain, attn_implementation="eager").eval()
    return oracle.float()


@pytest.mark.parametrize(("family", "name"), some(CASES, FEW), ids=str)
def test_logits_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    oracle = make(family, name, tmp_path)
    model = load(tmp_path, packed=True)
    packed = [part for part in model.modules() if isinstance(part, PackedLayer)]
    assert packed and all(
        part.packed is not None
        for path, part in model.named_modules()
        if isinstance(part, Linear) and "_proj" in path
    )
    assert_equals_transformers(model, oracle)
    stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
    assert bool(stacks) == (family in ("Qwen3Moe", "DeepseekV3"))
    for stack in stacks:  # the columns of each expert have another order
        assert (stack.packed is None) == ("order" in name) == (stack.weight is not None)


def test_experts_of_different_formats_are_widened(tmp_path: Path) -> None:
    """Also if only one of the two stacks of a layer has several formats."""
    make("Qwen3Moe", "fp8 tensor", tmp_path)
    expected = Sequences(load(tmp_path), 1, 8).step([(0, [5, 9, 33, 2])])[0][0]
    model = load(tmp_path, packed=True)
    packed = Sequences(model, 1, 8).step([(0, [5, 9, 33, 2])])[0][0]
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=1e-4)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")
    save_file(tensors, path)
    mixed = load(tmp_path, packed=True)
    got = Sequences(mixed, 1, 8).step([(0, [5, 9, 33, 2])])[0][0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    kept = [part.packed is not None for part in mixed.modules() if isinstance(part, ExpertStack)]
    assert kept == [True, True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_cpu_computes_the_same(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = make("Llama", "int4 groups", tmp_path)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, dtype)
    tolerance = 1e-4 if dtype == "float32" else 5e-3
    assert_equals_transformers(model, oracle, tolerance)
    kept = dtype == "auto" and model.format.native
    said = "14 kept as Q4_0" if kept else "14 widened to floats"
    assert said in caplog.text


def test_the_file_decides_which_modules_are_quantised(tmp_path: Path) -> None:
    """Matrices that the config ignores may be quantised, others may not, side by side."""
    make("Llama", "int4 groups", tmp_path)
    first, second = tmp_path / "plain", tmp_path / "mixed"
    second.mkdir()
    for file in ("config.json", "model.safetensors"):
        (second / file).write_bytes((first / file).read_bytes())
    numbers = quantise(second, "fp8 tensor", r"q_proj\.weight$")
    more = quantise(second, "int4 zeros", r"v_proj\.weight$")
    numbers |= {key: values for key, values in more.items() if "v_proj" in key}
    config = FORMATS["int4 zeros"].config
    edit_config(second, quantization_config=config | {"ignore": ["re:.*v_proj"]})
    save_file(numbers, first / "model.safetensors", metadata={"format": "pt"})
    model = load(second, packed=True)
    layer = model.get_submodule("layers.0.self_attn.qkv_proj")
    assert isinstance(layer, Linear) and layer.packed is not None
    assert layer.packed.sizes == [64, 32, 32] and len(layer.packed.parts) == 3
    ids = [(0, [5, 9, 33, 2])]
    logits = [Sequences(one, 1, 8).step(ids)[0][0] for one in (model, load(first))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_tensors_of_one_order_stay_one_matrix(tmp_path: Path) -> None:
    make("Llama", "gptq order", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn."
        for part in ("k_proj", "v_proj"):
            tensors[f"{name}{part}.g_idx"] = tensors[f"{name}q_proj.g_idx"].clone()
    save_file(tensors, path)
    layer_of_one = load(tmp_path, packed=True).get_submodule("layers.0.self_attn.qkv_proj")
    assert isinstance(layer_of_one, Linear) and layer_of_one.packed is not None
    assert layer_of_one.packed.whole is not None


def test_zero_biases_of_gptq_are_skipped(tmp_path: Path) -> None:
    make("Qwen3", "gptq", tmp_path)
    path = tmp_path / "model.safetensors"
    expected = Sequences(load(tmp_path), 1, 8).step([(0, [5, 9])])[0][0]
    name = "model.layers.0.mlp.up_proj"
    save_file(load_file(path) | {f"{name}.bias": torch.zeros(96)}, path)
    assert torch.equal(Sequences(load(tmp_path), 1, 8).step([(0, [5, 9])])[0][0], expected)
    save_file(load_file(path) | {"model.norm.bias": torch.zeros(64)}, path)
    with pytest.raises(ModelLoadError, match="unexpected tensors: model.norm.bias"):
        load(tmp_path)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    make("Llama", "fp8 blocks", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=f"tensor {name} .* is float8_e4m3fn, but the file"):
        load(tmp_path)


def test_tied_tables_are_shared_with_the_head(tmp_path: Path) -> None:
    make("Gemma3", "int4 groups", tmp_path)
    model = load(tmp_path, packed=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    quantise(tmp_path, "int8 groups", r"embed_tokens\.weight$", config=False)
    model = load(tmp_path, packed=True)
    assert model.lm_head.packed is not None and model.embed_tokens.packed is not None
    assert model.lm_head.packed.whole is model.embed_tokens.packed.weight
    ids = [(0, [5, 9, 33, 2])]
    logits = [Sequences(one, 1, 8).step(ids)[0][0] for one in (model, load(tmp_path))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("triton_interpreter")
def test_tied_tables_share_the_form_that_kernels_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("Gemma3", "int4 groups", tmp_path)
    quantise(tmp_path, "int8 groups", r"embed_tokens\.weight$", config=False)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    model = load(tmp_path, packed=True)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "0")
    assert model.lm_head.packed is not None and model.embed_tokens.packed is not None
    table = model.embed_tokens.packed.weight
    assert isinstance(table, TiledWeight) and model.lm_head.packed.whole is table
    ids = [(0, [5, 9, 33, 2])]
    logits = [Sequences(one, 1, 8).step(ids)[0][0] for one in (model, load(tmp_path))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
