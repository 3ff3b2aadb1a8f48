"""A wrong number in a config is named, wherever the config has it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.model.model_config import NotServed
from slipstream.configs.model.numbers import check_numbers
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.weights import make_hf_config

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from shapes import SHAPES  # noqa: E402

WRONG: list[Any] = [-1, -0.5, math.nan, math.inf, 1e40, 10**40, True, "8", [8], {"a": 8}]
ZERO_IS_WRONG = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
# Numbers that no computation reads: they name tokens, say what a trainer did, or are read by a
# part with checks of its own.
NOT_SIZES = (
    *("token_id", "initializer", "dropout", "bits", "group_size", "ep_size", "pretraining_tp"),
    *("aux_loss", "initial_context_length", "num_nextn", "next_n", "quantization_config"),
    *("draft_vocab", "moe_layer_freq", "eagle_aux", "compress", "mlp_only", "interval"),
    *("max_window_layers", "experts_per_token"),
)
FAMILIES = [name for name in SHAPES if not name.startswith("eagle3") and "fp8" not in name]


def numbers_of(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of a config's numbers."""
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += numbers_of(value, (*path, key))
        elif type(value) in (int, float):
            found.append((*path, key))
    return [each for each in found if not any(word in ".".join(each) for word in NOT_SIZES)]


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return copy


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_number_is_named_before_it_is_used(name: str) -> None:
    config = SHAPES[name]
    assert make_hf_config(config, "it") is not None
    paths = numbers_of(config)
    assert len(paths) > 8
    for path in paths:
        for value in [*WRONG, *([0] if path[-1] in ZERO_IS_WRONG else [])]:
            with pytest.raises(ModelLoadError) as caught:
                make_hf_config(changed(config, path, value), "it")
            sentence = str(caught.value)
            assert path[-1] in sentence and "\n" not in sentence, (path, value, sentence)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            r"high_freq_factor \(4\) must be above low_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "above 1 for YaRN"),
        ({"type": "longrope", "short_factor": [1.0]}, "'longrope' needs long_factor"),
        ({"rope_type": "longrope", "short_factor": 2, "long_factor": [1.0]}, "must be a list"),
        ({"rope_type": "longrope", "short_factor": [0], "long_factor": [1.0]}, "short_factor must"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ({"full_attention": {"rope_theta": 0}}, "rope_theta must be a number above 0"),
        ([4.0], "rope settings must be an object"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_settings_without_sense_are_named(rope: Any, words: str, key: str) -> None:
    with pytest.raises(NotServed, match=words):
        check_numbers({key: rope})


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_global_key_value_heads"])
def test_query_heads_share_key_heads_evenly(name: str) -> None:
    words = rf"num_attention_heads \(24\) must be a multiple of {name} \(5\)"
    with pytest.raises(NotServed, match=words):
        check_numbers({"num_attention_heads": 24, name: 5})
    check_numbers({"num_attention_heads": 24, name: 8})
    check_numbers({"num_attention_heads": 24, name: None})


def test_usual_settings_pass() -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "mscale": 0, "mscale_all_dim": 1}
    check_numbers({"rope_scaling": yarn, "rope_theta": 10000, "final_logit_softcapping": 0})
    check_numbers({"rope_parameters": {"full_attention": {"rope_type": "default"}}, "n_group": 0})


@pytest.mark.parametrize("kind", [None, 5, ["llama"], {}], ids=str)
def test_a_drafters_model_type_is_a_name(kind: Any) -> None:
    with pytest.raises(ModelLoadError, match="has no model_type that is a name"):
        make_hf_config({"model_type": kind}, "it", check_architecture=False)
