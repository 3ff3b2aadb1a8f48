"""Native CPU kernels: packed weights keep their values, products equal those of the values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from slipstream.kernels.cpu import bindings, build, matrix, weight
from slipstream.kernels.cpu.formats import STORED_TYPES, WEIGHT_TYPES, StoredRows
from slipstream.kernels.cpu.matrix import Matrix
from slipstream.kernels.cpu.weight import QuantizedWeight, stored_rows

RUNNABLE = [
    name
    for name, (flags, _) in build.INSTRUCTION_SETS.items()
    if flags <= build.processor_flags() and build.find_compiler()
]
# where a block holds halves: its scale and its lowest value or their factors
HALVES: dict[str, tuple[int, ...]] = {
    "MXFP4": (),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no compiler, or a processor without AVX2")


@pytest.fixture(params=RUNNABLE)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set that this processor has."""
    path = build.library_path(request.param)
    assert path is not None
    library = bindings.bind(str(path))
    monkeypatch.setattr(weight, "library", lambda: library)
    monkeypatch.setattr(matrix, "library", lambda: library)
    yield request.param


def random_rows(name: str, rows: int, columns: int, seed: int = 0) -> StoredRows:
    """Random bits, but for scales that are ordinary numbers."""
    kind, draws = STORED_TYPES[name], np.random.default_rng(seed)
    if kind.is_float:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return stored_rows(torch.from_numpy(draws.normal(size=(rows, columns))).to(dtype))
    data = draws.integers(0, 256, (rows, kind.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, kind.block_bytes)
    if name == "MXFP4":
        blocks[:, 0] = draws.integers(100, 150, len(blocks))
    for at in HALVES.get(name, (0,)):
        halves = draws.normal(size=len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return StoredRows(kind, data, columns)


def values_of(rows: StoredRows) -> Tensor:
    """What the gguf package makes of them."""
    values = dequantize(rows.data, GGMLQuantizationType[rows.type.name])
    return torch.from_numpy(values.copy()).view(rows.shape)


def rounded(x: Tensor) -> Tensor:
    """Activations as the kernels round them: 32 of them share a scale."""
    blocks = x.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 16319
    return (torch.where(scale > 0, blocks / scale, 0).round() * scale).view(x.shape)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packed_weight_keeps_every_value(native: str, name: str, rows: int) -> None:
    stored = random_rows(name, rows, 512)
    packed = QuantizedWeight.pack(stored)
    assert packed.shape == (rows, 512)
    assert torch.equal(packed.dequantize(), values_of(stored))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_rows_can_be_reordered_and_looked_up(native: str, name: str) -> None:
    stored, order = random_rows(name, 40, 256), np.random.default_rng(1).permutation(40)
    packed = QuantizedWeight.pack(StoredRows(stored.type, stored.data, 256, order))
    ids = torch.tensor([39, 0, 17, 17], dtype=torch.int32)
    assert torch.equal(packed.rows(ids), values_of(stored)[torch.from_numpy(order)[ids.long()]])
    with pytest.raises(IndexError, match="outside of the 40 rows"):
        packed.rows(torch.tensor([40]))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_packed_weight_takes_the_bits_of_the_file(native: str, name: str) -> None:
    stored = random_rows(name, 64, 1024)
    # six-bit scales are unpacked to bytes
    most = 1.03 if name in ("Q4_K", "Q5_K") else 1.0
    assert QuantizedWeight.pack(stored).nbytes <= most * stored.nbytes


@pytest.mark.parametrize("name", WEIGHT_TYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 21])
def test_product_equals_that_of_the_values(native: str, name: str, num_rows: int) -> None:
    stored = random_rows(name, 50, 512)
    x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(2))
    product = Matrix([QuantizedWeight.pack(stored)]).multiply(x)
    inputs = x if stored.type.is_float else rounded(x)
    exact = inputs.double() @ values_of(stored).double().T
    size = inputs.double().abs() @ values_of(stored).double().abs().T
    assert ((product - exact).abs() <= 2e-6 * size).all()
    # and the rounding of the activations costs little
    assert (product - x.double() @ values_of(stored).double().T).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_outputs_of_a_row_do_not_depend_on_the_others(native: str, name: str) -> None:
    weights = Matrix([QuantizedWeight.pack(random_rows(name, 33, 256))])
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(3))
    together = weights.multiply(x)
    for count in range(1, 10):
        assert torch.equal(weights.multiply(x[:count]), together[:count])


def test_parts_of_different_formats_stand_side_by_side(native: str) -> None:
    stored = [
        random_rows(name, rows, 256) for name, rows in (("Q4_K", 48), ("Q6_K", 20), ("F16", 7))
    ]
    bias = torch.randn(75, generator=torch.Generator().manual_seed(4))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    merged = Matrix([QuantizedWeight.pack(rows) for rows in stored], bias)
    alone = [Matrix([QuantizedWeight.pack(rows)]).multiply(x) for rows in stored]
    torch.testing.assert_close(merged.multiply(x), torch.cat(alone, 1) + bias, rtol=0, atol=1e-5)


def test_threads_share_a_product(native: str) -> None:
    weights = Matrix([QuantizedWeight.pack(random_rows("Q4_1", 700, 256))])
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(6))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append([weights.multiply(x[:n]) for n in (1, 2, 70) for _ in range(50)])
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(results):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_the_outputs(native: str, value: float) -> None:
    weights = Matrix([QuantizedWeight.pack(random_rows("Q8_0", 16, 64))])
    x = torch.ones(2, 64)
    x[0, 40] = value
    outputs = weights.multiply(x)
    assert outputs[0].isnan().all() and outputs[1].isfinite().all()


def test_zeros_give_zeros(native: str) -> None:
    weights = Matrix([QuantizedWeight.pack(random_rows("Q5_K", 16, 256))])
    assert torch.equal(weights.multiply(torch.zeros(1, 256)), torch.zeros(1, 16))


def test_rows_that_blocks_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of Q4_0's block of 32"):
        WEIGHT_TYPES["Q4_0"].row_bytes(40)
    with pytest.raises(ValueError, match="are not rows of 64 numbers"):
        StoredRows(WEIGHT_TYPES["Q4_0"], np.zeros((3, 35), np.uint8), 64)


def test_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[Path] = []

    def compile_library(path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        compiled.append(path)

    monkeypatch.setattr(build, "compile_library", compile_library)
    assert build.library_path() == build.library_path() == compiled[0]
    assert len(compiled) == 1


def test_a_library_in_the_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PACKAGED", tmp_path)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    name = build.instruction_set(build.processor_flags())
    assert name is not None
    packaged = tmp_path / build._file_name(name)
    packaged.touch()
    assert build.library_path() == packaged


def test_no_compiler_means_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.library_path() is None
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_means_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    assert build.library_path() is None
    assert "x.h:1: error: no such thing" in caplog.text


def test_the_environment_switches_the_library_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_KERNELS", "off")
    assert build.library_path() is None


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ({"sse2"}, None),
        ({"avx2", "fma", "f16c"}, "avx2"),
        ({"avx2", "fma", "f16c", "avx512f", "avx512bw"}, "avx2"),
        (
            {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
            "avx512",
        ),
    ],
)
def test_instruction_set_is_the_best_one(flags: set[str], best: str | None) -> None:
    assert build.instruction_set(flags) == best


def test_sizes_are_those_of_the_gguf_package() -> None:
    for name, kind in WEIGHT_TYPES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (kind.block_size, kind.block_bytes)
