"""The blocks that a dry start skips."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from slipstream.runner.graphs.dispatch import eager_descriptor
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model
from slipstream.runner.models.short_model import ShortPass, shorten
from slipstream.runner.step.target import Target

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def blocks_left(config: Any) -> list[int]:
    """Indices of the blocks that still run."""
    model: Any = build_model(config, WeightFormat(torch.device("meta"), torch.bfloat16))
    original = list(model._blocks)
    num_layers = len(model.attention_layers())
    count = shorten(model)
    left = [i for i, block in enumerate(model._blocks) if block is original[i]]
    assert len(left) == count and shorten(model) == count
    assert len(model.attention_layers()) == num_layers  # their KV is sized as ever
    return left


def test_two_of_many_equal_blocks_remain() -> None:
    """The first has no residual yet."""
    assert blocks_left(LlamaConfig(**SIZES, num_hidden_layers=9)) == [0, 1]


def test_one_block_remains_for_each_kind_after_each_kind() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = Qwen2Config(
        **SIZES, num_hidden_layers=8, layer_types=kinds * 2, use_sliding_window=True,
        sliding_window=16,
    )  # fmt: skip
    # first; full after full; sliding after full; sliding after sliding; full after sliding
    assert blocks_left(config) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)])
def test_other_kinds_of_models_are_not_shortened(model: Any) -> None:
    assert shorten(model) == 0


def test_a_short_pass_returns_the_same_shapes_as_a_whole_one() -> None:
    model: Any = build_model(
        LlamaConfig(**SIZES, num_hidden_layers=6),
        WeightFormat(torch.device("meta"), torch.bfloat16),
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
        results.append((hidden.shape, aux.shape))
        shorten(model)
    assert results[0] == results[1] and results[0][1] == (5, 3 * 64)
    assert seen == [0, 1]


def test_the_run_before_a_capture_is_short_and_the_capture_is_whole() -> None:
    model: Any = build_model(
        LlamaConfig(**SIZES, num_hidden_layers=5),
        WeightFormat(torch.device("meta"), torch.bfloat16),
    )
    whole = list(model._blocks)
    runs: list[int] = []

    class Counting(Target):
        def _forward(self, *_: Any, **__: Any) -> Any:
            runs.append(sum(a is b for a, b in zip(model._blocks, whole, strict=True)))
            return torch.zeros(2, 3), None

    buffers: Any = SimpleNamespace(fill_dummy=lambda desc: [], max_num_tokens=2)
    cache: Any = SimpleNamespace(attention_state=lambda *metadata: None)
    target = Counting(model, cache, [], buffers)
    desc = eager_descriptor(2, 2, 1)
    target.create_forward_fn(desc, warmup=True)  # makes the outputs
    runs.clear()
    for warmup in (True, False, True):
        forward, state = target.create_forward_fn(desc, warmup)
        forward(state)
    assert runs == [2, 5, 2] and model._blocks == whole


def test_a_short_run_of_another_kind_of_model_is_whole() -> None:
    with ShortPass(torch.nn.Linear(1, 1)).running():
        pass


def test_a_short_run_that_fails_leaves_the_model_whole() -> None:
    model: Any = build_model(
        LlamaConfig(**SIZES, num_hidden_layers=3),
        WeightFormat(torch.device("meta"), torch.bfloat16),
    )
    whole = list(model._blocks)
    with pytest.raises(ValueError, match="why"), ShortPass(model).running():
        raise ValueError("why")
    assert model._blocks == whole
