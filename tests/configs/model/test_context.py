"""The context length that a model's config states."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.configs.model.model_config import context_length

QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 32768, "rope_parameters": QWEN}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": QWEN}, 131072),
        ({"max_position_embeddings": 163840, "rope_scaling": QWEN}, 163840),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 2}}, 200),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn"}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": QWEN | {"factor": float("nan")}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": QWEN | {"factor": -4}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": QWEN | {"factor": 1e300}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": "yarn"}, 100),
        ({"max_position_embeddings": "100"}, None),
        ({}, None),
    ],
)
def test_yarn_stretches_the_original_length(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length
