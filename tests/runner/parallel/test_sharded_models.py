"""Each family on two ranks computes the logits that it computes on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.matching import slots_of_one_form
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import ResolvedModel, load_weights
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model, check_experts
from slipstream.runner.parallel.ranks import Cut, Ranks

from .. import tiny_v4, tiny_v32
from ..model_harness import CPU, Sequences
from ..models import (
    test_deepseek,
    test_gemma,
    test_glm4_moe,
    test_gpt_oss,
    test_llama,
    test_qwen3_5,
    test_qwen_moe,
)
from .threads import on_ranks

# name -> (config class, settings over the shape of that family's own tests, form of experts)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama": ("LlamaConfig", test_llama.SHAPE, {"attention_bias": True, "mlp_bias": True}, ""),
    "tied": ("LlamaConfig", test_llama.SHAPE, {"tie_word_embeddings": True}, ""),
    "one_kv_head": ("LlamaConfig", test_llama.SHAPE, {"num_key_value_heads": 1}, ""),
    "qwen2": ("Qwen2Config", test_llama.SHAPE, {}, ""),
    "qwen3": ("Qwen3Config", test_llama.SHAPE, {"head_dim": 24}, ""),
    "qwen3_moe": ("Qwen3MoeConfig", test_qwen_moe.SHAPE, {"head_dim": 24}, "matrices"),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        test_qwen_moe.SHAPE,
        {"shared_expert_intermediate_size": 40},
        "stacked",
    ),
    "gemma3": ("Gemma3TextConfig", test_gemma.SHAPE, test_gemma.GEMMA3["untied_capped"], ""),
    "gemma4": ("Gemma4TextConfig", test_gemma.SHAPE, test_gemma.GEMMA4["shared_kv"], ""),
    "gemma4_values": (
        "Gemma4TextConfig",
        test_gemma.SHAPE,
        test_gemma.GEMMA4["values_are_keys"],
        "",
    ),
    "gemma4_experts": ("Gemma4TextConfig", test_gemma.SHAPE, test_gemma.GEMMA4["experts"], ""),
    "gpt_oss": ("GptOssConfig", test_gpt_oss.SHAPE, {}, "matrices"),
    "gpt_oss_mxfp4": ("GptOssConfig", test_gpt_oss.SHAPE, {}, "mxfp4"),
    "deepseek_v2": (
        "DeepseekV2Config",
        test_deepseek.SHAPE,
        {"topk_method": "greedy", "q_lora_rank": None},
        "",
    ),
    "deepseek_v3": ("DeepseekV3Config", test_deepseek.SHAPE, {"attention_bias": True}, "stacked"),
    "deepseek_v32": ("DeepseekV32Config", tiny_v32.SHAPE, {"index_topk": 2}, "stacked"),
    "deepseek_v4": ("DeepseekV4Config", tiny_v4.SHAPE, {"index_topk": 1}, "matrices"),
    "glm": ("Glm4MoeConfig", test_glm4_moe.SHAPE, test_glm4_moe.CASES["glm_4_5"], "stacked"),
    "phi3": ("Phi3Config", test_llama.SHAPE, {"pad_token_id": None}, ""),
    "qwen3_5": ("Qwen3_5TextConfig", test_qwen3_5.SHAPE, {}, ""),
    "qwen3_next": ("Qwen3NextConfig", test_qwen3_5.SHAPE, test_qwen3_5.EXPERTS, "stacked"),
}
ROWS = [[(0, 9), (1, 5)], [(0, 1), (1, 2)]]  # (request, tokens) of each step


def build(config: Any, ranks: Ranks | None = None) -> Any:
    return build_model(config, WeightFormat(CPU, torch.float32, ranks=ranks))


def fill(model: Any, form: str) -> dict[str, tuple[int, ...]]:
    """Random weights that depend on their names alone; returns the shapes in the checkpoint."""
    slots = model.checkpoint_slots()
    given = [name for name, slot in slots.items() if slot.form and slot.form[1] == form]
    slots = slots_of_one_form(slots, given)
    for name, slot in slots.items():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        if form == "mxfp4" and name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (122, 126)
            tensor = torch.randint(low, high, slot.shape, generator=generator).byte()
        else:
            tensor = torch.randn(slot.shape, generator=generator) * 0.3
        slot.load(tensor if slot.cut is None else slot.cut.of(tensor))
    return {name: slot.shape for name, slot in slots.items()}


def logits_of(model: Any) -> torch.Tensor:
    sequences = Sequences(model, 2, 16, block_size=8)
    generator, out = torch.Generator().manual_seed(3), []
    for step in ROWS:
        rows = [
            (req, torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist())
            for req, n in step
        ]
        out += sequences.step(rows)[0]
    return torch.cat(out)


def make(case: str) -> tuple[Any, str]:
    name, shape, settings, form = CASES[case]
    own: Mapping[str, Any] = {**shape, **settings}
    config = getattr(transformers, name)(**own)
    config.architectures = [f"{name.removesuffix('Config').removesuffix('Text')}ForCausalLM"]
    return config, form


# Models whose experts may be divided by expert, in both forms of checkpoints.
BY_EXPERT = (
    "qwen3_moe",
    "qwen2_moe",
    "gemma4_experts",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm",
    "qwen3_next",
)


@pytest.mark.parametrize(
    ("case", "by_expert"), [*((c, False) for c in CASES), *((c, True) for c in BY_EXPERT)]
)
def test_two_ranks_compute_what_one_computes(case: str, by_expert: bool) -> None:
    config, form = make(case)
    whole = build(config)
    shapes = fill(whole, form)
    expected = logits_of(whole)

    def run(ranks: Ranks) -> tuple[torch.Tensor, int, int]:
        model = build(config, replace(ranks, by_expert=by_expert))
        assert fill(model, form) == shapes
        logits = logits_of(model)
        return logits, model.format.ranks.communicator.num_collectives, size_of(model)

    results = on_ranks(2, run)
    assert torch.equal(results[0][0], results[1][0])  # so that both ranks draw the same tokens
    torch.testing.assert_close(results[0][0], expected, atol=2e-4, rtol=2e-4)
    assert results[0][2] < 0.75 * size_of(whole)
    # The embedding, two sums a layer (a third where dense and routed parts are normed apart), and
    # the logits; in each of two steps.
    sums = 3 if case == "gemma4_experts" else 2
    assert results[0][1] == 2 * (2 + sums * config.num_hidden_layers)


def size_of(model: Any) -> int:
    buffers = {id(b): b for n, b in model.named_buffers() if "cos_sin" not in n}
    return sum(b.numel() for b in buffers.values())


@pytest.mark.parametrize(
    ("size", "settings", "what"),
    [
        (3, {}, "4 attention heads"),
        (4, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}, "3 KV heads"),
        (4, {"intermediate_size": 98}, "98 intermediate features"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    size: int, settings: dict[str, Any], what: str
) -> None:
    config = transformers.LlamaConfig(**{**test_llama.SHAPE, **settings})
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(ModelLoadError, match=f"{what} cannot be divided among .* {size} ranks"):
        on_ranks(size, lambda ranks: build(config, ranks))


def test_a_rank_reads_only_its_rows(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**test_llama.SHAPE)
    config.architectures = ["LlamaForCausalLM"]
    whole = build(config)
    slots = whole.checkpoint_slots()
    stored = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    save_file(stored, tmp_path / "model.safetensors")
    resolved = ResolvedModel(tmp_path, "safetensors", config)
    load_weights(whole, resolved)
    expected = logits_of(whole)
    read = {0: 0, 1: 0}

    def run(ranks: Ranks) -> torch.Tensor:
        model = build(config, ranks)
        checkpoint = SafetensorsCheckpoint(tmp_path, None)
        own = replace(resolved, opened=checkpoint)
        tensors = checkpoint.tensors

        def counted(*args: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in tensors(*args):
                read[ranks.rank] += tensor.nbytes
                yield name, tensor

        checkpoint.tensors = counted  # type: ignore[method-assign]
        load_weights(model, own)
        return logits_of(model)

    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    total = sum(tensor.nbytes for tensor in stored.values())
    assert all(0.5 * total <= size < 0.52 * total for size in read.values())


@pytest.mark.parametrize("dim", [0, 1])
def test_of_rows_a_gpus_reader_reads_only_a_part(dim: int, tmp_path: Path) -> None:
    tensor = torch.arange(60.0).view(6, 10)
    save_file({"a": tensor, "b": tensor + 1}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, None, CPU)
    cut = Cut(dim, 2, 5)
    checkpoint.keep_parts({"a": ((6, 10), cut)})
    read = {"a": 0, "b": 0}

    def count(name: str, num_bytes: int) -> None:
        read[name] += num_bytes

    found = dict(checkpoint._read(CPU, count))
    assert torch.equal(found["a"], cut.of(tensor)) and torch.equal(found["b"], tensor + 1)
    assert read == {"a": 120 if dim == 0 else 240, "b": 240}


def test_a_model_without_experts_is_refused() -> None:
    config, _ = make("llama")
    with pytest.raises(ModelLoadError, match="--enable-expert-parallel needs a model with experts"):
        on_ranks(2, lambda ranks: check_experts(build(config, replace(ranks, by_expert=True))))
