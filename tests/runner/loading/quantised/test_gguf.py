"""GGUF's rows as packed weights are the numbers that the gguf package reads, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from slipstream.kernels.cpu.formats import WEIGHT_TYPES
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.loading.quantised.gguf import packed_rows

from ....kernels.test_cpu_weights import random_rows

CPU, META = torch.device("cpu"), torch.device("meta")
QUANTISED = [name for name, kind in WEIGHT_TYPES.items() if not kind.is_float]
KINDS = {name: "int4" if name.startswith("Q4") else "int8" for name in QUANTISED}


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
