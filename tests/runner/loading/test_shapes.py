"""The shapes of real models that benches use need nothing but their config.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import ModelConfig, SpeculativeConfig
from slipstream.runner.drafters.heads import HeadHost, find_configured, outline
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from shapes import SHAPES, write  # noqa: E402

NOWHERE = torch.device("meta")
# target -> (its EAGLE-3 head, billions of parameters)
SIZES = {
    "llama-8b": ("eagle3-8b", 8.0),
    "qwen3-30b-a3b": ("eagle3-30b-a3b", 30.5),
    "gpt-oss-20b": ("eagle3-gpt-oss-20b", 20.9),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_and_its_head_of_random_weights(name: str, tmp_path: Path) -> None:
    """On meta tensors, which have no memory."""
    write(tmp_path)
    head, billions = SIZES[name]
    folder = str(tmp_path / name)
    resolved = resolve_model(ModelConfig(model=folder, load_format="dummy"))
    model = build_model(
        resolved.hf_config, WeightFormat(NOWHERE, torch.bfloat16), max_position=4096
    )
    load_weights(model, resolved)
    tables = [buffer for key, buffer in model.named_buffers() if "cos_sin" not in key]
    count = sum(tensor.numel() for tensor in tables) / 1e9
    assert count == pytest.approx(billions, rel=0.01)
    drafter = SpeculativeConfig("eagle3", str(tmp_path / head), load_format="dummy")
    found = find_configured(drafter, resolved)
    assert found is not None and found.head is not None
    ids = SHAPES[head]["eagle_aux_hidden_state_layer_ids"]
    assert found.head.aux_boundaries == tuple(ids)
    outline("eagle3", drafter, HeadHost(4096, model, resolved), found)


@pytest.mark.parametrize("name", [n for n in SHAPES if "eagle3" not in n])
def test_a_start_can_be_rehearsed(name: str, tmp_path: Path) -> None:
    """Kernels are compiled ahead for a model of meta tensors, so nothing may read its weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    resolved = resolve_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    model = build_model(
        resolved.hf_config, WeightFormat(NOWHERE, torch.bfloat16, packed=True), max_position=64
    )
    load_weights(model, resolved)
    assert all(buffer.is_meta for buffer in model.buffers())
