"""Which blocks a dry start leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from slipstream.runner.models.registry import build_model
from slipstream.runner.short_model import shorten

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def blocks_left(config: Any) -> list[int]:
    """Numbers of the blocks that still run."""
    model: Any = build_model(config, torch.device("meta"), torch.bfloat16)
    original = list(model._blocks)
    num_layers = len(model.attention_layers())
    count = shorten(model)
    left = [i for i, block in enumerate(model._blocks) if block is original[i]]
    assert len(left) == count and shorten(model) == count
    assert len(model.attention_layers()) == num_layers  # their KV is sized as ever
    return left


def test_of_blocks_that_are_alike_two_are_left() -> None:
    """The first has no residual yet."""
    assert blocks_left(LlamaConfig(**SIZES, num_hidden_layers=9)) == [0, 1]


def test_each_kind_is_left_behind_each_kind() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = Qwen2Config(
        **SIZES, num_hidden_layers=8, layer_types=kinds * 2, use_sliding_window=True,
        sliding_window=16,
    )  # fmt: skip
    # first; full after full; sliding after full; sliding after sliding; full after sliding
    assert blocks_left(config) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)])
def test_models_of_another_build_are_left_as_they_are(model: Any) -> None:
    assert shorten(model) == 0


def test_a_pass_over_what_is_left_hands_on_what_the_whole_would() -> None:
    model: Any = build_model(
        LlamaConfig(**SIZES, num_hidden_layers=6), torch.device("meta"), torch.bfloat16
    )

    class Attention:
        def attend(self, layer_id: int, query: Any, key: Any, value: Any) -> Any:
            seen.append(layer_id)
            return query

        def rotate_and_attend(self, layer_id: int, query: Any, *_: Any) -> Any:
            return self.attend(layer_id, query, None, None)

    ids, positions = (torch.zeros(5, dtype=d, device="meta") for d in (torch.int32, torch.int64))
    results = []
    for _ in range(2):
        seen: list[int] = []
        hidden, aux = model(ids, positions, Attention(), (2, 4, 6))
        results.append((hidden.shape, [tap.shape for tap in aux]))
        shorten(model)
    assert results[0] == results[1] and len(results[0][1]) == 3
    assert seen == [0, 1]
