"""Few rows run through one launch a layer, with equal results, if the kernel knows all weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from slipstream.configs.model.quantisation import parse_quantisation
from slipstream.kernels.packed.persistent import row_weights
from slipstream.kernels.packed.persistent.row_layer import multiply_row_reference
from slipstream.kernels.packed.persistent.row_weights import RowLayer
from slipstream.runner.attention.base import Rotary
from slipstream.runner.loading.dummy import load_random
from slipstream.runner.models.formats import row_decoder
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.llama import LlamaModel
from slipstream.runner.models.short_model import ShortPass

pytestmark = pytest.mark.usefixtures("triton_interpreter")
SIZES = dict(
    vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64,
)  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


class Attends:
    """Attention to the row itself, rotated by its position and scaled by its layer."""

    def rotate_and_attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary
    ) -> Tensor:
        query, key, value = (x.sum(0) if x.dim() == 4 else x for x in (query, key, value))
        sums = query.float() + (key + value).repeat_interleave(2, -2).float()
        return (sums * (1 + layer) / 4).bfloat16().contiguous()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch has a next layer; the plain version takes the place of the kernel."""
    monkeypatch.setattr(row_weights, "_LEAST_BYTES", 0)
    monkeypatch.setenv("SLIPSTREAM_ROW_LAYER", "1")
    seen: list[bool] = []

    def multiply(x: Tensor, residual: Tensor, layer: RowLayer, counter: Tensor) -> Any:
        assert x.shape[0] == residual.shape[0] <= row_decoder.MOST_ROWS and counter.tolist() == [0]
        seen.append(layer.qkv is not None)
        return multiply_row_reference(x, residual, layer)

    monkeypatch.setattr(row_decoder, "multiply_row", multiply)
    return seen


def model_of(quantisation: dict[str, Any], **changes: Any) -> LlamaModel:
    """A random model whose matrices have the form of a GPU; they are multiplied by torch."""
    fmt = WeightFormat(torch.device("cpu"), torch.bfloat16, packed=True)
    model = LlamaModel(LlamaConfig(**SIZES, **changes), fmt, 64)
    said = parse_quantisation({"quantization_config": quantisation})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLIPSTREAM_TRITON", "1")
        load_random(model.checkpoint_slots(), fmt.device, seed=1, std=0.1, quantisation=said)
    for block in model.blocks:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
    return model


def forward(model: LlamaModel, rows: int = 1) -> tuple[Tensor, Tensor | None]:
    ids, positions = torch.arange(rows, dtype=torch.int32) + 5, torch.arange(rows) + 7
    attends: Any = Attends()
    of_gpu = replace(model.rotary.at(positions), cos=None, sin=None)
    with patch.object(model.rotary, "at", return_value=of_gpu):
        return model.forward(ids, positions, attends, (0, 2, 3))


def close(got: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a is not None and b is not None and a.shape == b.shape
        assert float((a - b).float().norm() / b.float().norm()) < 0.02


@pytest.mark.parametrize(("rows", "qk_norm"), [(1, False), (1, True), (3, False), (4, True)])
def test_few_rows_equal_the_blocks_one_by_one(
    launches: list[bool], monkeypatch: pytest.MonkeyPatch, rows: int, qk_norm: bool
) -> None:
    model = model_of(GPTQ, use_qk_norm=qk_norm)
    got = forward(model, rows)
    assert launches == [True, True, False]
    monkeypatch.setenv("SLIPSTREAM_ROW_LAYER", "0")
    close(got, forward(model, rows))
    assert len(launches) == 3


def test_more_rows_than_the_most_run_block_by_block(
    launches: list[bool],
) -> None:
    model = model_of(GPTQ)
    forward(model, 5)
    assert launches == []
    forward(model, 4)
    assert launches == [True, True, False]


def test_duplicate_blocks_can_be_left_out(
    launches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(GPTQ)
    with ShortPass(model).running():
        got = forward(model)
        assert launches == [True, False]
        monkeypatch.setenv("SLIPSTREAM_ROW_LAYER", "0")
        close(got, forward(model))


def test_small_layers_run_block_by_block(
    launches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_weights, "_LEAST_BYTES", 1 << 20)
    forward(model_of(GPTQ))
    assert launches == []


@pytest.mark.parametrize(
    ("rows", "quantisation", "changes"),
    [
        (5, {}, {}),
        (1, {"group_size": 64}, {}),
        (1, {}, {"attention_bias": True}),
        (1, {"dynamic": {"-:.*down_proj": {}}}, {}),  # one matrix has 16 bits
    ],
)
def test_others_run_block_by_block(
    launches: list[bool], rows: int, quantisation: dict[str, Any], changes: dict[str, Any]
) -> None:
    forward(model_of(GPTQ | quantisation, **changes), rows)
    assert launches == []
