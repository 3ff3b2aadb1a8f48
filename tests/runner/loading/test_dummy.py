"""Random weights in quantised formats, and the memory that weights are said to need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from slipstream.configs.model.quantisation import parse_quantisation
from slipstream.configs.schema import ModelConfig
from slipstream.runner.loading.dummy import random_packed
from slipstream.runner.loading.model_check import outline_model, weight_bytes
from slipstream.runner.loading.weights import resolve_model
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.packed import Packed
from slipstream.runner.models.formats.weight_format import resolve_format
from slipstream.runner.step.traffic import expert_bytes, weight_formats

from ...speculators.tiny_engine import save_llama
from ..model_harness import CPU, Sequences, load
from .quantised.quantised_folder import edit_config, quantise
from .quantised.stored_formats import FORMATS

MATRICES = r"(q|k|v|o|gate|up)_proj\.weight$"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama", layers=2)


@pytest.mark.parametrize("name", FORMATS)
def test_random_matrices_have_the_deviation_of_others(name: str) -> None:
    said = parse_quantisation({"quantization_config": FORMATS[name].config})
    assert said is not None
    scheme = said.scheme_of("model.layers.0.self_attn.q_proj")
    assert scheme is not None
    generator = torch.Generator().manual_seed(1)
    weight = random_packed((100, 320), scheme, CPU, generator)
    numbers = weight.dequantise()
    assert weight.kind == scheme.kind and bool(numbers.isfinite().all())
    assert 0.015 < float(numbers.std()) < 0.025 and abs(float(numbers.mean())) < 0.003
    outline = random_packed((100, 320), scheme, torch.device("meta"), None)
    assert outline.nbytes == weight.nbytes


def held_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {id(b): b for b in model.buffers()}.values())


@pytest.mark.parametrize("name", ["fp8 channel", "gptq", "nvfp4"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_config_makes_random_weights_quantised(name: str, load_format: str, folder: Path) -> None:
    """Random weights have the formats and sizes of the stored ones."""
    quantise(folder, name, MATRICES)
    edit_config(folder, intermediate_size=64 if load_format == "dummy" else 48)
    model = load(folder, packed=True, load_format=load_format)
    kinds = {part.weight.kind for part in model.modules() if isinstance(part, Packed)}
    assert kinds == set(weight_formats(model).split(", ")) and len(kinds) == 1
    logits = Sequences(model, 1, 8).step([(0, [1, 2, 3])])[0][0]
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0
    resolved = resolve_model(ModelConfig(model=str(folder), load_format=load_format))
    fmt = replace(resolve_format("float32", CPU, None), packed=True)
    outline = outline_model(resolved, fmt, 128)
    assert weight_bytes(outline, resolved, fmt) == held_bytes(model)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["fp8 channel", "int4 zeros"])
def test_experts_are_quantised_and_counted_too(name: str, load_format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    quantise(tmp_path, name)
    model = load(tmp_path, packed=True, load_format=load_format)
    stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
    assert stacks and all(stack.packed is not None for stack in stacks)
    assert bool(Sequences(model, 1, 8).step([(0, [1, 2, 3])])[0][0].isfinite().all())
    resolved = resolve_model(ModelConfig(model=str(tmp_path), load_format=load_format))
    fmt = replace(resolve_format("float32", CPU, None), packed=True)
    assert weight_bytes(outline_model(resolved, fmt, 128), resolved, fmt) == held_bytes(model)
    routed = sum(tensor.nbytes for stack in stacks for tensor in stack.buffers())
    assert expert_bytes(model) == (routed, 0.5)


def test_a_plain_config_makes_plain_random_weights(folder: Path) -> None:
    model = load(folder, packed=True, load_format="dummy")
    assert not [part for part in model.modules() if isinstance(part, Packed)]
    assert weight_formats(model) == ""
