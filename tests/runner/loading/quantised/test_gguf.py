"""GGUF's rows as packed weights are the numbers that the gguf package reads, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from slipstream.kernels.cpu.formats import STORED_TYPES
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.loading.gguf_values import values_of
from slipstream.runner.loading.quantised import delivery
from slipstream.runner.loading.quantised.delivery import fitting
from slipstream.runner.loading.quantised.gguf import packed_rows
from slipstream.runner.models.layers import CheckpointSlot

from ....kernels.test_cpu_weights import random_rows

CPU, META = torch.device("cpu"), torch.device("meta")
QUANTISED = [name for name, kind in STORED_TYPES.items() if not kind.is_float]
KINDS = {name: "int4" if name.startswith("Q4") else "int8" for name in QUANTISED} | {"MXFP4": "fp4"}


@pytest.mark.parametrize("name", QUANTISED)
def test_numbers_are_exact(name: str) -> None:
    rows = random_rows(name, 37, 512)
    expected = torch.from_numpy(dequantize(rows.data, GGMLQuantizationType[name]).copy())
    weight = packed_rows(rows, CPU)
    assert isinstance(weight, PackedWeight) and weight.kind == KINDS[name]
    assert torch.equal(weight.dequantise(), expected.view(37, 512))
    order = np.random.default_rng(1).permutation(37)
    ordered = packed_rows(replace(rows, order=order), CPU)
    assert isinstance(ordered, PackedWeight)
    assert torch.equal(ordered.dequantise(), expected.view(37, 512)[torch.from_numpy(order)])
    outline = packed_rows(rows, META)
    assert isinstance(outline, PackedWeight) and outline.nbytes == weight.nbytes
    assert all(tensor.is_contiguous() for tensor in weight.tensors)


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_floats_stay_floats(name: str) -> None:
    rows = random_rows(name, 5, 24)
    plain = packed_rows(rows, CPU)
    assert isinstance(plain, torch.Tensor) and plain.shape == (5, 24)
    assert torch.equal(plain.view(torch.uint8), torch.from_numpy(rows.data))


def test_a_gpu_gets_floats_in_formats_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantising a weight in every step would be slower than reading its plain form."""
    slot = CheckpointSlot((37, 512), lambda weight: None, takes_packed=CPU)
    rows = random_rows("Q8_0", 37, 512)
    assert isinstance(fitting(slot, rows), PackedWeight)  # a reference multiplies
    monkeypatch.setattr(delivery, "is_card", lambda device: True)
    for has_kernels in (True, False):
        monkeypatch.setattr(delivery, "has_kernels", lambda weight, device, has=has_kernels: has)
        given = fitting(slot, rows)
        assert isinstance(given, PackedWeight) == has_kernels
        assert isinstance(fitting(CheckpointSlot((37, 512), slot.load), rows), torch.Tensor)
    assert isinstance(given, torch.Tensor) and torch.equal(given, values_of(rows))
