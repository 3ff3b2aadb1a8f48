"""Phi-3, Phi-4, Ministral and Mistral 3 equal transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.kernels.cpu import weight as native
from slipstream.runner.models.families.mistral3 import query_scales
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.models.rotary import inverse_frequencies, rope_parameters

from ..model_harness import CPU, assert_equals_transformers, load
from ..random_oracle import random_oracle, randomised

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
    image_size=16, patch_size=8,
)  # fmt: skip


def longrope(original: int) -> dict[str, Any]:
    """Two lists of divisors for heads of 16 of which 12 values rotate."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
        "original_max_position_embeddings": original,
        "factor": 4.0,
        "attention_factor": 1.2,
    }


STEEP = {  # the scale of queries changes every four positions
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 4, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {}),
    "phi3_window": ("Phi3", {"sliding_window": 6}),
    "phi4_mini": (
        "Phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": longrope(64),
            "original_max_position_embeddings": 64,
        },
    ),
    "phi3_long": (
        "Phi3",
        {"rope_parameters": longrope(1), "original_max_position_embeddings": 1},
    ),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 5,
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": STEEP}),
}


def make_oracle(family: str, settings: dict[str, Any], folder: Path) -> Any:
    return random_oracle(family, {**SHAPE, **settings}, folder)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


@pytest.mark.skipif(not native.available(), reason="no native CPU kernels on this machine")
@pytest.mark.parametrize("case", ["phi3", "ministral3"])
def test_native_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case], tmp_path)
    assert_equals_transformers(load(tmp_path, "auto"), oracle)


@pytest.mark.parametrize("text", ["Mistral", "Ministral3"])
def test_the_text_part_of_a_model_that_sees(text: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.Mistral3Config(
        text_config=getattr(transformers, f"{text}Config")(**SHAPE, head_dim=16),
        vision_config=transformers.PixtralVisionConfig(**VISION),
        image_token_index=5,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    config.text_config._attn_implementation = "eager"
    oracle = randomised(transformers.Mistral3ForConditionalGeneration(config), tmp_path)
    assert_equals_transformers(load(tmp_path), oracle)


def test_the_served_context_decides_between_the_lists_of_longrope() -> None:
    config = transformers.Phi3Config(
        **SHAPE, rope_parameters=longrope(32), original_max_position_embeddings=32
    )
    config.architectures = ["Phi3ForCausalLM"]
    plain = 10000.0 ** (-torch.arange(0, 12, 2) / 12)
    for served, name in ((32, "short_factor"), (64, "long_factor")):
        rope = rope_parameters(config) | {"served_positions": served}
        frequencies, factor = inverse_frequencies(rope, 16)
        torch.testing.assert_close(frequencies, plain / torch.tensor(longrope(32)[name]))
        assert factor == 1.2
        model = build_model(config, WeightFormat(CPU, torch.float32), max_position=served)
        angle = model.rotary.cos_sin_cache[1, 5] / factor
        assert float(angle) == pytest.approx(float(frequencies[5].cos()))
    without = rope_parameters(config) | {"attention_factor": None}
    expected = (1 + torch.tensor(4.0).log() / torch.tensor(32.0).log()).sqrt()
    assert inverse_frequencies(without, 16)[1] == pytest.approx(float(expected))


def test_queries_are_scaled_beyond_the_original_context_only() -> None:
    config = transformers.Ministral3Config(**SHAPE, head_dim=16, rope_parameters=STEEP)
    assert query_scales(config, 4) is None
    scales = query_scales(config, 9)
    assert scales is not None and scales[:4].tolist() == [1.0] * 4
    assert scales[8] == pytest.approx(1 + 0.3 * float(torch.tensor(3.0).log()))
