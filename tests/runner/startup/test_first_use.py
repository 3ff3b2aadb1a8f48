"""Libraries are loaded by running each matrix product, shape and size, that torch will compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_target import tiny_llama
from torch.nn import functional as F

from slipstream.kernels.linear.linear_choice import Choice, Shape, Skinny
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.runner.models.formats import packed
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.layers import Linear
from slipstream.runner.startup.first_use import first_operations, first_products, load_libraries

from ...kernels.quant.random_weights import random_weight


class OursUpTo16(LinearChooser):
    """Chooses our kernels for the output head of up to 16 rows."""

    def choose(self, shape: Shape, num_rows: int) -> Choice:
        ours = shape.role == "head" and num_rows <= 16
        return Skinny(64, 64, 4, 4, 1, 16) if ours else None


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(outputs, rows) of each product so far."""
    found: list[tuple[int, int]] = []

    def record(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        found.append((weight.shape[0], x.shape[0]))
        return linear(x, weight, bias)

    linear = F.linear
    monkeypatch.setattr(F, "linear", record)
    return found


def test_each_shape_is_multiplied_once_at_each_size(products: list[tuple[int, int]]) -> None:
    model = tiny_llama()  # two layers alike
    shapes = {layer.shape for layer in model.modules() if isinstance(layer, Linear)}
    assert first_products([model, model], [3, 40, 3]) == len(products) == 2 * len(shapes)
    assert len(shapes) == 5 and {rows for _, rows in products} == {3, 40}


def test_products_of_our_own_kernels_are_skipped(products: list[tuple[int, int]]) -> None:
    model = tiny_llama()
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.chooser = OursUpTo16({})
    first_products([model], [16, 17])
    vocab = model.lm_head.out_features
    assert (vocab, 17) in products and (vocab, 16) not in products
    assert len(products) == 9


def test_products_by_copies_of_quantised_weights_run_too(
    products: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = WeightFormat(torch.device("cpu"), torch.bfloat16, packed=True)
    layer = Linear(64, {"a": 8, "b": 16}, fmt, bias=True)
    for rows, slot in zip((8, 16), list(layer.checkpoint_slots("", ""))[::2], strict=True):
        slot[1].load(random_weight("fp8 rows", rows, 64))
    assert layer.packed is not None and layer.by_torch(3)
    chosen = Skinny(64, 128, 4, 4, 1, 16)
    monkeypatch.setattr(
        packed, "choose_packed", lambda weight, role, rows: chosen if rows <= 16 else None
    )
    assert first_products([layer], [16, 17]) == 1 and products == [(24, 17)]


def test_too_little_memory_is_left_for_sizing_the_cache_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(F, "linear", fail)
    assert first_products([tiny_llama()], [1]) == 0


def test_neither_random_numbers_nor_weights_change() -> None:
    model = tiny_llama()
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with torch.inference_mode():
        load_libraries([model, None], 24, None, 99)
        first_operations(torch.device("cpu"), 99)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
