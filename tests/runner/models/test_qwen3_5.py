"""Qwen3.5 and Qwen3-Next equal transformers on tiny random models, whatever its states log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.runner.errors import ModelLoadError

from ..model_harness import Sequences, assert_equals_transformers, load
from ..random_oracle import random_oracle

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    max_position_embeddings=64,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    eos_token_id=None,
    pad_token_id=None,
)


EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
)


def make_oracle(folder: Path, family: str = "Qwen3_5", **settings: Any) -> Any:
    config = "Config" if family == "Qwen3Next" else "TextConfig"
    return random_oracle(family, {**SHAPE, **settings}, folder, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3_5")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_oracle(folder)


@pytest.mark.parametrize("log", [0, 2, 8])
def test_logits_equal_transformers(folder: Path, oracle: Any, log: int) -> None:
    assert_equals_transformers(load(folder), oracle, log=log)


@pytest.mark.parametrize("family", ["Qwen3_5Moe", "Qwen3Next"])
def test_the_families_with_experts(tmp_path: Path, family: str) -> None:
    dense = {"mlp_only_layers": [1]} if family == "Qwen3Next" else {}
    oracle = make_oracle(tmp_path, family, **EXPERTS, **dense)
    assert_equals_transformers(load(tmp_path), oracle, log=2)


def test_equal_numbers_of_heads_and_other_layer_types(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    oracle = make_oracle(tmp_path, linear_num_key_heads=4, layer_types=kinds)
    assert_equals_transformers(load(tmp_path), oracle)


def test_rejected_tokens_never_reach_the_states(folder: Path, oracle: Any) -> None:
    """Rows that verify wrong tokens, of any length and acceptance, leave no trace."""
    model, generator = load(folder), torch.Generator().manual_seed(3)
    text = torch.randint(97, (30,), generator=generator).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([text])).logits[0]
    sequences = Sequences(model, 1, 40, log=4)
    sequences.step([(0, text[:5])])
    # (accepted, wrong) of each row; without wrong ones, a step without drafts
    for accepted, wrong in [(1, 3), (4, 0), (2, 1), (1, 0), (1, 2), (3, 1), (1, 0), (1, 0), (4, 0)]:
        start = sequences.lengths[0]
        bad = [(token + 1) % 97 for token in text[start + accepted : start + accepted + wrong]]
        (logits,), _ = sequences.step([(0, text[start : start + accepted] + bad)])
        sequences.lengths[0] = start + accepted
        got = logits[:accepted]
        torch.testing.assert_close(got, expected[start : start + accepted], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("fuses", [False, True])
def test_triton_kernels_give_the_same_logits(
    folder: Path, oracle: Any, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, rows with rejected tokens, and a decode; norms, rotation and attention in one
    kernel or not."""
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    text = torch.randint(97, (14,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([text])).logits[0]
    from slipstream.runner.attention.triton import TritonBackend

    sequences = Sequences(load(folder), 1, 32, block_size=16, backend=TritonBackend(), log=3)
    if not fuses:
        for builder in sequences.builders:
            monkeypatch.setattr(builder, "_arrivals", None)
    for accepted, wrong in [(7, 0), (1, 2), (2, 1), (1, 0), (3, 0)]:
        start = sequences.lengths[0]
        bad = [(token + 1) % 97 for token in text[start + accepted : start + accepted + wrong]]
        (logits,), _ = sequences.step([(0, text[start : start + accepted] + bad)])
        sequences.lengths[0] = start + accepted
        wanted = expected[start : start + accepted]
        torch.testing.assert_close(logits[:accepted], wanted, atol=1e-3, rtol=1e-3)


def as_multimodal(folder: Path, target: Path, tied: bool) -> None:
    """Save the same weights as a multimodal checkpoint does, with other parts."""
    text = json.loads((folder / "config.json").read_text())
    text.pop("architectures")
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": text,
    }
    target.mkdir()
    (target / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not (tied and name == "lm_head.weight")
    }
    extra = {"model.visual.patch_embed.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors | extra, target / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_part_of_a_multimodal_checkpoint(
    folder: Path, oracle: Any, tmp_path: Path, tied: bool
) -> None:
    as_multimodal(folder, tmp_path / "whole", tied)
    model, plain = load(tmp_path / "whole"), load(folder)
    assert model.tied == tied
    got = Sequences(model, 1, 8).step([(0, [4, 5])])[0][0]
    expected = Sequences(plain, 1, 8).step([(0, [4, 5])])[0][0]
    assert torch.equal(got, expected) != tied


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_num_key_heads": 3}, r"linear_num_value_heads \(4\) must be a multiple"),
        ({"linear_value_head_dim": 0}, "must be positive"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one of them full_attention"),
    ],
)
def test_configs_that_cannot_be_served(
    folder: Path, oracle: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | settings))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy")
