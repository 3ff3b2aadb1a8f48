"""Linear layers with quantised weights, interpreted, equal products with their exact numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Gemv, Shape, Skinny
from slipstream.kernels.packed import tuned
from slipstream.kernels.packed.kinds import GATE_UP, PARTS, PLAIN, Quantised, Row, fits_row
from slipstream.kernels.packed.linear import (
    choose_packed,
    packed_gated_linear,
    packed_linear,
)
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import TiledWeight, prepare, tile

from ...cases import some
from ..linear.test_triton_linear import close, normed
from ..quant.random_weights import FORMATS, random_weight

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
ONE = Gemv(16, 256, 4)
FEW = Skinny(16, 0, 3, 4, 1, 16)
ROW, ROWS = Row(16, 3, 1, 1, spans=2), Row(16, 3, 1, 1, 2, 0)
SIZES = [(3, 328, True), (17, 264, False), (3, 128, False)]  # rows, columns, TMA
MODES = ("plain", "gated", "parts")
CASES = [(name, mode, *size) for name in FORMATS for mode in MODES for size in SIZES]
KEPT = [
    ("fp8 rows", "plain", 3, 328, True),
    ("fp8 blocks", "gated", 3, 328, True),
    ("int8 rows", "parts", 3, 328, True),
    ("int4 128", "plain", 3, 328, True),
    ("int4 64 zeros", "gated", 3, 328, True),
    ("int4 32 offsets", "gated", 3, 328, True),
    ("int4 32 super", "gated", 3, 328, True),
    ("int8 16 super", "plain", 3, 128, False),
    ("int8 32 offsets", "parts", 3, 328, True),
    ("int5 32 super", "gated", 3, 328, True),
    ("int5 32", "plain", 17, 264, False),
    ("int6 16 super", "parts", 3, 328, True),
    ("int6 16 super", "gated", 3, 128, False),
    ("mxfp4", "plain", 3, 128, False),
    ("nvfp4", "parts", 3, 328, True),
]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory, so that unwritten outputs are noticed."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


def inputs(
    name: str, rows: int, outputs: int, size: int
) -> tuple[Tensor, TiledWeight, Tensor, Tensor]:
    """x, the weight, its exact numbers in float64, and a bias."""
    weight = random_weight(name, outputs, size)
    x, bias = torch.randn(rows, size).half(), torch.randn(outputs).half()
    return x, tile(weight), weight.dequantise().double(), bias


@pytest.mark.parametrize(("name", "mode", "rows", "size", "tma"), some(CASES, kept=KEPT))
def test_products_are_those_of_the_exact_numbers(
    name: str, mode: str, rows: int, size: int, tma: bool
) -> None:
    from slipstream.kernels.packed.triton import packed_skinny as kernel

    x, weight, exact, bias = inputs(name, rows, 22, size)
    product = x.double() @ exact.T
    if mode == "plain":
        close(kernel.multiply(x, weight, FEW, tma=tma), product)
    elif mode == "gated":
        gate, up = (product + bias).chunk(2, -1)
        got = kernel.multiply(x, weight, FEW, GATE_UP, bias, tma=tma)
        close(got, torch.nn.functional.silu(gate) * up)
    else:
        parts = kernel.multiply(x, weight, replace(FEW, split_k=2), PARTS, bias, tma=tma)
        assert parts.shape == (2, rows, 22) and parts.dtype == torch.float32
        close(parts.sum(0), product + bias)


@pytest.mark.parametrize("columns", [16, 32, 48, 256])
def test_blocks_of_all_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader says that the group of a block has no more columns than the matrix."""
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    blocks = random_weight("fp8 blocks", 144, columns)
    scales = blocks.scales[:, :1].contiguous()
    packed = replace(blocks, group=columns, scales=scales)
    weight, exact = tile(packed), packed.dequantise().double()
    for rows in (1, 20):
        x = torch.randn(rows, columns).half()
        choice = choose_packed(weight, "o", rows)
        assert isinstance(choice, Skinny)  # `Gemv` knows blocks of 128 columns
        close(packed_linear(x, weight, None, choice), x.double() @ exact.T)
        gate, up = (x.double() @ exact.T).chunk(2, -1)
        choice = choose_packed(weight, "gate_up", rows)
        got = packed_gated_linear(x, weight, None, "silu", choice)
        close(got, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("name", some(["fp8 rows", "fp8 blocks", "int8 rows"], kept=["fp8 blocks"]))
def test_one_row(name: str) -> None:
    from slipstream.kernels.packed.triton import packed_gemv as kernel

    x, weight, exact, bias = inputs(name, 1, 22, 328)
    norm, residual = (torch.rand(328).half(), 1e-5), torch.randn(1, 22).half()
    close(kernel.multiply(x, weight, ONE), x.double() @ exact.T)
    product = normed(x, norm) @ exact.T + bias
    close(kernel.multiply(x, weight, ONE, PLAIN, bias, "", norm, residual), product + residual)
    gate, up = product.chunk(2, -1)
    got = kernel.multiply(x, weight, ONE, GATE_UP, bias, "gelu_tanh", norm)
    close(got, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize(
    "name",
    some(
        [
            *("fp8 blocks", "int4 128", "int4 128 zeros", "int4 32 offsets", "int5 32"),
            *("int5 32 super", "int6 16 super", "int6 32"),
        ],
        kept=["int4 128", "int4 128 zeros", "int5 32 super"],
    ),
)
def test_programs_of_many_rows_round_scaled_numbers(name: str) -> None:
    from slipstream.kernels.packed.triton import packed_skinny as kernel

    x, weight, exact, _ = inputs(name, 130, 22, 264)
    got = kernel.multiply(x, weight, replace(FEW, block_m=128), tma=True)
    close(got, x.double() @ exact.half().double().T)


ROW_FORMATS = [name for name in FORMATS if fits_row(tile(random_weight(name, 1, 1280)))]
ROW_CASES = [(name, mode, tma) for name in ROW_FORMATS for mode in MODES for tma in (True, False)]
ROW_KEPT = [
    ("int4 128", "plain", True),
    ("int4 64 zeros", "gated", True),
    ("fp8 blocks", "parts", True),
    ("int8 rows", "plain", False),
    ("nvfp4", "parts", True),
]


@pytest.mark.parametrize(("name", "mode", "tma"), some(ROW_CASES, kept=ROW_KEPT))
def test_one_row_on_tensor_cores(name: str, mode: str, tma: bool) -> None:
    from slipstream.kernels.packed.triton import packed_row as kernel

    x, weight, exact, bias = inputs(name, 1, 22, 1280)  # steps of 2 spans, the last one in part
    norm, residual = (torch.rand(1280).half(), 1e-5), torch.randn(1, 22).half()
    assert fits_row(weight)
    if mode == "parts":
        parts = kernel.multiply(x, weight, Row(16, 3, 1, 2, spans=2), PARTS, bias, tma=tma)
        assert parts.shape == (2, 1, 22)
        close(parts.sum(0), x.double() @ exact.T + bias)
        return
    product = normed(x, norm) @ exact.T + bias
    if mode == "plain":
        got = kernel.multiply(x, weight, ROW, PLAIN, bias, "", norm, residual, tma)
        close(got, product + residual, 2)  # it rounds the normed row
    else:
        gate, up = product.chunk(2, -1)
        got = kernel.multiply(x, weight, ROW, GATE_UP, bias, "silu", norm, tma=tma)
        close(got, torch.nn.functional.silu(gate) * up, 2)


@pytest.mark.parametrize(
    ("name", "mode"),
    some(
        [(n, m) for n in ROW_FORMATS for m in MODES], [("int4 128", "gated"), ("fp8 rows", "plain")]
    ),
)
def test_the_warps_of_a_program_share_the_columns_of_few_rows(name: str, mode: str) -> None:
    from slipstream.kernels.packed.triton import packed_row as kernel

    x, weight, exact, bias = inputs(name, 5, 22, 768)
    product, residual = x.double() @ exact.T + bias, torch.randn(5, 22).half()
    if mode == "plain":
        got = kernel.multiply(x, weight, ROWS, PLAIN, bias, residual=residual)
        close(got, product + residual)
    elif mode == "gated":
        gate, up = product.chunk(2, -1)
        got = kernel.multiply(x, weight, ROWS, GATE_UP, bias, tma=True)
        close(got, torch.nn.functional.silu(gate) * up)
    else:
        parts = kernel.multiply(x, weight, replace(ROWS, split_k=2), PARTS, bias, tma=True)
        assert parts.shape == (2, 5, 22)
        close(parts.sum(0), product)


def test_no_tile_for_up_to_64_rows_rounds_weights() -> None:
    from slipstream.kernels.packed.triton.packed_skinny import _rounds

    for warps in (1, 4, 8):
        for mode in (PLAIN, GATE_UP):
            assert not _rounds(Skinny(128, 256, 3, warps, 1, 64), mode)
    assert _rounds(Skinny(128, 256, 3, 8, 1, 128), GATE_UP)
    assert not _rounds(Skinny(128, 256, 3, 8, 1, 128), PLAIN)


@pytest.mark.parametrize("name", some(["fp8 blocks", "int4 128"], kept=["int4 128"]))
def test_norm_and_residual_are_fused(name: str) -> None:
    from slipstream.kernels.packed.triton import packed_skinny as kernel

    x, weight, exact, bias = inputs(name, 3, 22, 200)
    norm, residual = (torch.rand(200).half(), 1e-5), torch.randn(3, 22).half()
    product = normed(x, norm) @ exact.T
    got = kernel.multiply(x, weight, FEW, PLAIN, bias, norm=norm, residual=residual)
    close(got, product + bias + residual, 2)  # it rounds normed rows


def test_the_public_functions_pick_kernels_and_keep_the_order_of_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    order = torch.randperm(128).int()
    packed = replace(random_weight("int4 32", 24, 128), order=order)
    weight = prepare(packed)
    assert isinstance(weight, TiledWeight)
    assert torch.equal(weight.dequantise(), packed.dequantise())
    x, norm = torch.randn(3, 128).half(), (torch.rand(128).half(), 1e-5)
    choice = choose_packed(weight, "gate_up", 3)
    assert isinstance(choice, Skinny) and choice.split_k == 1
    small = replace(choice, block_n=16, norm=1)  # the norm cannot be in the kernel
    exact = normed(x, norm) @ packed.dequantise().double().T
    gate, up = exact.chunk(2, -1)
    got = packed_gated_linear(x, weight, None, "silu", small, norm)
    close(got, torch.nn.functional.silu(gate) * up, 3)
    assert choose_packed(packed, "qkv", 3) is None
    assert choose_packed(weight, "qkv", 300) is None
    monkeypatch.setenv("SLIPSTREAM_TRITON", "0")
    assert prepare(packed) is packed
    close(packed_gated_linear(x, weight, None, "silu", small, norm), got.double(), 3)


@pytest.mark.parametrize(
    "name", some(FORMATS, kept=["fp8 blocks", "int4 64 zeros", "int4 32 super"])
)
def test_many_rows_use_a_copy_with_every_number(name: str) -> None:
    from slipstream.kernels.quant.triton.widen import widen

    packed = random_weight(name, 11, 328)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(widen(tile(packed), dtype), packed.dequantise(dtype))
        ids = torch.tensor([10, 0, 10, 3], dtype=torch.int32)
        assert torch.equal(widen(tile(packed), dtype, ids), packed.rows(ids, dtype))


def test_rows_are_quantised_in_the_order_of_the_words() -> None:
    from slipstream.kernels.packed.triton.packed_tokens import quantise_rows

    x = torch.randn(3, 200).half()
    codes, scales = quantise_rows(x, 256)
    numbers = torch.zeros(3, 200, dtype=torch.int8)
    weight = tile(PackedWeight("int8", numbers, torch.ones(3, 1), 200, 200))
    words = replace(weight, words=codes.view(torch.int16), scales=scales.T)
    close(words.dequantise(torch.float32), x.double(), 10_000)
    assert torch.equal(scales[:, 0], x.float().abs().amax(1) / 127)


def test_sums_of_codes_are_rescaled() -> None:
    from slipstream.kernels.packed.triton.packed_tokens import rescale

    sums, bias = torch.randint(-9999, 9999, (3, 70), dtype=torch.int32), torch.randn(70).half()
    rows, scales, residual = torch.rand(3, 1), torch.rand(70), torch.randn(3, 70).half()
    got = rescale(sums, rows, scales, bias, residual, torch.float16)
    close(got, sums.double() * rows * scales + bias + residual)


def test_activations_are_quantised_only_if_the_checkpoint_asks() -> None:
    asks = random_weight("fp8 rows", 32, 128)
    asks = replace(asks, activations="fp8-token")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_TRITON", "1")
        assert choose_packed(tile(asks), "other", 1) == Gemv(4, 1024, 4)
        assert choose_packed(tile(asks), "head", 1) == Gemv(8, 1024, 4)
        for rows in (1, 64):
            assert not isinstance(choose_packed(tile(asks), "down", rows), Quantised)
        for rows in (257, 5000):
            assert isinstance(choose_packed(tile(asks), "down", rows), Quantised)
            plain = tile(replace(asks, activations="16bit"))
            assert not isinstance(choose_packed(plain, "down", rows), Quantised)


def test_measured_choices_come_before_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    monkeypatch.setattr(tuned, "_path", lambda device: tmp_path / "found" / "choices.json")
    weight = tile(random_weight("int4 128", 32, 256))
    shape, device = Shape("o", 32, 256), torch.device("cpu")
    found = {("int4", shape, 1): Row(16, 4, 1, 2), ("int4", shape, 16): Skinny(64, 0, 3, 4, 2, 16)}
    tuned.tuned_choices.cache_clear()  # type: ignore[attr-defined]
    tuned.save_choices(device, {**found, ("int4", shape, 64): None})
    tuned.tuned_choices.cache_clear()  # type: ignore[attr-defined]
    assert choose_packed(weight, "o", 1) == Row(16, 4, 1, 2)
    assert choose_packed(weight, "o", 9) == found["int4", shape, 16]
    assert choose_packed(weight, "o", 64) is None
    assert isinstance(choose_packed(weight, "o", 32), Skinny)
    other = tile(random_weight("int4 32 offsets", 32, 256))  # its slices have 32 columns
    assert not isinstance(choose_packed(other, "o", 1), Row)
    (tmp_path / "found" / "choices.json").write_text("[")
    tuned.tuned_choices.cache_clear()  # type: ignore[attr-defined]
    assert choose_packed(weight, "o", 1) != Row(16, 4, 1, 2)
    tuned.tuned_choices.cache_clear()  # type: ignore[attr-defined]
