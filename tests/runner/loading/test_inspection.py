"""What is counted while weights are read, and which weights get a warning."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.kernels.cpu.formats import WEIGHT_TYPES, StoredRows
from slipstream.runner.loading import inspection
from slipstream.runner.loading.file_reader import read_tensors
from slipstream.runner.loading.gguf_values import values_of
from slipstream.runner.loading.inspection import FiniteCheck, LoadMeter, touch
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint


def test_meter_counts_parts_of_tensors_and_never_more_than_they_have() -> None:
    seen: list[tuple[int, int]] = []
    meter = LoadMeter({"a": 100, "b": 50}, lambda done, total: seen.append((done, total)))
    for name, count in (("a", 30), ("a", 30), ("skipped", 900), ("a", 60), ("b", 10)):
        meter.read(name, count)
    meter.finish("a")
    meter.finish("b")
    assert seen == [(0, 150), (30, 150), (60, 150), (100, 150), (110, 150), (150, 150)]


def test_meter_sends_a_bounded_number_of_messages() -> None:
    seen: list[int] = []
    meter = LoadMeter({"a": 1_000_000}, lambda done, total: seen.append(done))
    for _ in range(100_000):
        meter.read("a", 10)
    assert seen[0] == 0 and seen[-1] == 1_000_000 and 100 < len(seen) < 210


@pytest.mark.parametrize("mapped", [True, False])
def test_a_tensor_is_counted_while_it_is_read(
    tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_PIECE_BYTES", 1000)
    short = partial(read_tensors, piece_bytes=1000)
    monkeypatch.setattr("slipstream.runner.loading.safetensors_weights.read_tensors", short)
    tensors = {"large": torch.rand(3000), "none": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, None)
    counts: list[tuple[str, int]] = []

    def note(name: str, count: int) -> None:
        counts.append((name, count))

    dict(checkpoint.tensors(note) if mapped else checkpoint._read(torch.device("cpu"), note))
    totals: Counter[str] = Counter()
    for name, count in counts:
        totals[name] += count
    assert +totals == {"large": 12_000, "scalar": 4}
    assert len([name for name, _ in counts if name == "large"]) == 12


def test_touching_leaves_a_tensor_as_it_is() -> None:
    tensor = np.arange(10_000, dtype=np.int16).reshape(100, 100)
    counted: list[int] = []
    touch(tensor, "a", lambda name, count: counted.append(count))
    assert sum(counted) == tensor.nbytes and (tensor.ravel() == np.arange(10_000)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_PIECE_VALUES", 64)
    check = FiniteCheck("m")
    fine = torch.full((10, 30), torch.finfo(dtype).max, dtype=dtype)
    for at in (0, 150, 299):
        spoilt = fine.clone()
        spoilt.view(-1)[at] = value
        check.inspect(f"at {at}", spoilt)
    if dtype != torch.float64:  # its greatest value is infinite in float32, which is compared
        check.inspect("fine", fine)
    check.inspect("empty", torch.empty(0, dtype=dtype))
    check.inspect("ids", torch.arange(5))
    check.inspect("fp8", torch.zeros(5).to(torch.float8_e4m3fn))
    check.inspect("meta", torch.empty(5, device="meta"))
    assert check.report() == ["at 0", "at 150", "at 299"]


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_a_scale_that_is_not_finite_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are as the gguf package makes and reads them."""
    monkeypatch.setattr(inspection, "_PIECE_BLOCKS", 3)
    stored = WEIGHT_TYPES[kind]
    check = FiniteCheck("m")
    rng = np.random.default_rng(0)
    data = rng.integers(0, 60, (4, stored.row_bytes(512)), dtype=np.uint8)
    for spoilt in (False, True):
        blocks = data.reshape(-1, stored.block_bytes)
        if spoilt:  # what infinity is in the two bytes of the scale or the value
            at = 208 if kind == "Q6_K" else stored.block_bytes - 2 if stored.is_float else 0
            blocks[5, at : at + 2] = {"F32": (128, 127), "BF16": (128, 127)}.get(kind, (0, 124))
        rows = StoredRows(stored, data, 512)
        with np.errstate(all="ignore"):
            assert bool(values_of(rows).isfinite().all()) != spoilt
        check.inspect(f"spoilt {spoilt}", rows)
    assert check.report() == ["spoilt True"]
