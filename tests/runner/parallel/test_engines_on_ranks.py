"""Engines of every kind of model on two ranks give the text, drafts and seeded draws of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.cpu import weight

from ...cases import some
from ...speculators.all_drafters import Drafters
from ...speculators.eagle_oracle import head_weights, save_head
from ...speculators.tiny_engine import Run, TinyEngine, prompts
from ...speculators.v4_mtp_oracle import V4MtpOracle
from ..loading.quantised.quantised_folder import quantise
from .thread_group import ThreadGroup, build_on_threads

SHAPE: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=0,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma3": {"sliding_window": 8, "tie_word_embeddings": True},
    "DeepseekV3": dict(
        moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, head_dim=8, v_head_dim=16, n_group=2, topk_group=1,
    ),
}  # fmt: skip
CASES = [
    *((family, method) for family in FAMILIES for method in ("off", "eagle3")),
    *((family, "mtp") for family in ("DeepseekV3", "DeepseekV4")),
    ("DeepseekV4", "off"),
]
# `test_thread_group.py` and `test_v4_mtp.py` have Llama, MTP modules and DeepSeek V4.
FEW = [(family, "eagle3") for family in ("Qwen3", "Gemma3", "DeepseekV3")]


def make(folder: Path, family: str) -> Path:
    """Save a random model in which near-ties are rare."""
    torch.manual_seed(2)
    kind = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + kind)(**{**SHAPE, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                tensor.copy_(torch.rand_like(tensor) + (0 if family == "Gemma3" else 0.5))
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder)
    return folder


def texts(target: Path, spec: SpeculativeConfig, size: int, dtype: str) -> list[Run]:
    """Of a greedy run, and of one that draws with seeds."""
    groups: list[ThreadGroup] = []
    build = {} if size == 1 else {"build": partial(build_on_threads, groups)}
    engine = TinyEngine(target, spec, dtype=dtype, **build)
    try:
        asked = prompts(3, longest=20)
        runs = [engine.run(asked, max_tokens=12, temperature=heat) for heat in (0.0, 0.9)]
    finally:
        engine.close()
    for group in groups:
        group.check()
    return runs


def compare(target: Path, spec: SpeculativeConfig, dtype: str = "float32") -> None:
    alone, both = (texts(target, spec, size, dtype) for size in (1, 2))
    for one, two in zip(alone, both, strict=True):
        assert two.tokens == one.tokens
        assert (two.num_drafts, two.accepted_per_pos) == (one.num_drafts, one.accepted_per_pos)
        assert one.num_drafts > 0 or spec.method == "off"
    assert alone[0].tokens != alone[1].tokens


def eagle3(folder: Path) -> SpeculativeConfig:
    head = save_head(folder, head_weights(True), True, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    return SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=3)


@pytest.mark.parametrize(("family", "method"), some(CASES, FEW))
def test_two_ranks_emit_what_one_emits(family: str, method: str, tmp_path: Path) -> None:
    spec = SpeculativeConfig()
    if method == "eagle3":
        spec = eagle3(tmp_path / "head")
    elif method == "mtp":
        spec = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    if family == "DeepseekV4":
        V4MtpOracle(tmp_path / "target")
        target = tmp_path / "target"
    elif method == "mtp":
        target = Drafters(tmp_path).pair("mtp")[0]
    else:
        target = make(tmp_path / "target", family)
    compare(target, spec)


@pytest.mark.skipif(not weight.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("method", some(["off", "eagle3"], ["eagle3"]))
def test_ranks_with_quantised_parts_emit_what_one_emits(method: str, tmp_path: Path) -> None:
    """As the CPU serves them by default: in GGUF's formats, by its own kernels."""
    target = make(tmp_path / "target", "Llama")
    quantise(target, "int4 zeros", size=0.3)
    spec = SpeculativeConfig() if method == "off" else eagle3(tmp_path / "head")
    compare(target, spec, "auto")
