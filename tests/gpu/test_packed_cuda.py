"""The compiled kernels for linear layers with quantised weights are correct on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from slipstream.kernels import launch
from slipstream.kernels.cpu.formats import STORED_TYPES
from slipstream.kernels.linear.linear_choice import Gemv, Skinny
from slipstream.kernels.packed.kinds import (
    Codes,
    Direct,
    PackedChoice,
    Quantised,
    Row,
    fits_direct,
    fits_few_rows,
    fits_gemv,
    fits_row,
    fits_small_groups,
)
from slipstream.kernels.packed.linear import (
    choose_packed,
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
)
from slipstream.kernels.quant.tiled import TiledWeight, prepare
from slipstream.runner.loading.quantised.gguf import packed_rows

from ..kernels.quant.random_weights import FORMATS, random_weight
from ..kernels.test_cpu_weights import random_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GGUF_TYPES = [name for name, kind in STORED_TYPES.items() if not kind.is_float and name != "MXFP4"]
HALVES = [torch.bfloat16, torch.float16]
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill freed memory with NaN, and enable dependent launches, the harder case."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")
    monkeypatch.setattr(launch, "pdl_wanted", lambda: True)


def close(
    got: Tensor, exact: Tensor, roundings: int = 1, rounded: torch.dtype | None = None
) -> None:
    """Compare with the exact product; `rounded` is the type to which its weights were rounded."""
    error = float((got.double() - exact).norm() / exact.norm())
    assert error < roundings * max(BOUNDS[got.dtype], BOUNDS[rounded or got.dtype]), error


def made(name: str, rows: int, columns: int) -> tuple[TiledWeight, Tensor]:
    """A weight and its exact numbers in float64."""
    packed = random_weight(name, rows, columns, "cuda")
    weight = prepare(packed)
    assert isinstance(weight, TiledWeight)
    return weight, packed.dequantise().double()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 9, 33, 70])
@pytest.mark.parametrize("size", [1024, 1352])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_exact(name: str, size: int, rows: int, dtype: torch.dtype) -> None:
    """The error is that of one rounding of the output: no weight is rounded, unless a program has
    128 rows."""
    weight, exact = made(name, 600, size)
    x, bias = torch.randn(rows, size, device="cuda").to(dtype), torch.randn(600, device="cuda")
    bias = bias.to(dtype)
    product = x.double() @ exact.T
    gate, up = (product + bias.double()).chunk(2, -1)
    for role in ("qkv", "gate_up", "head"):
        chosen = choose_packed(weight, role, max(rows, 17))
        assert isinstance(chosen, Skinny)
        if rows < 17:
            chosen = replace(chosen, block_m=16, stages=3)
        choices: list[PackedChoice] = [chosen, replace(chosen, block_n=128), None]
        if rows == 70:
            choices.append(replace(chosen, block_m=128, stages=2))
        choices += [replace(chosen, block_m=64), choose_packed(weight, role, rows)]
        if rows == 1 and fits_gemv(weight):
            choices += [Gemv(4, 1024, 4), Gemv(8, 512, 4), Gemv(2, 256, 4, ahead=3)]
        if rows == 1 and fits_row(weight):
            choices += [Row(16, 3, 4, 1), Row(32, 4, 2, 2, 2)]
        if rows == 1 and fits_direct(weight):
            choices += [Direct(1, 4, 2), Direct(2, 4, 1, split_k=2), Direct(1, 8, 1)]
        if rows == 1 and fits_small_groups(weight):
            choices += [Direct(1, 4, 2), Direct(1, 2, 1, split_k=2), Direct(1, 8, 1)]
        if rows == 9 and fits_few_rows(weight):
            choices += [Direct(2, 4, 1, norm=0), Direct(1, 2, 1, split_k=2, norm=0)]
        if rows == 9 and fits_row(weight):
            choices += [Row(16, 3, 4, 1, 4, 0), Row(16, 4, 4, 2, 4, 0)]
        for choice in choices:
            if role == "qkv":
                got = packed_linear_parts(x, weight, None, choice)
                many = isinstance(choice, Skinny) and choice.block_m >= 128
                rounded = dtype if many else None
                close(got if got.dim() == 2 else got.sum(0), product, rounded=rounded)
            elif role == "gate_up":
                got = packed_gated_linear(x, weight, bias, "silu", choice)
                close(got, torch.nn.functional.silu(gate) * up, 2)
            else:
                close(packed_linear(x, weight, bias, choice), product + bias.double())


@pytest.mark.parametrize("columns", [1280, 1312, 2048])
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_types_of_gguf_are_multiplied_as_they_are(name: str, columns: int) -> None:
    """The chosen kernels for one row and more, with norm and residual: the memory that they read is
    that of the file, and the numbers are those of the gguf package."""
    if columns % STORED_TYPES[name].block_size:
        pytest.skip("no whole blocks")
    stored = random_rows(name, 384, columns)
    exact = torch.from_numpy(dequantize(stored.data, GGMLQuantizationType[name]).copy())
    exact = exact.view(384, columns).double().cuda()
    weight = prepare(packed_rows(stored, torch.device("cuda")))
    assert isinstance(weight, TiledWeight)
    assert columns % 256 or weight.nbytes <= 1.03 * stored.data.nbytes
    assert torch.equal(weight.dequantise().double(), exact)
    for rows in (1, 5, 16, 33, 70):
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        residual = torch.randn(rows, 384, device="cuda").bfloat16()
        product = x.double() @ exact.T
        scale = product.abs().amax()  # random scales have any size
        choice = choose_packed(weight, "qkv", rows)
        assert rows == 1 or rows > 16 or fits_few_rows(weight)
        assert isinstance(
            choice, Direct if rows == 1 else Direct | Skinny if rows <= 16 else Skinny
        )
        few = [Direct(1, 4, 1, norm=0), Direct(2, 4, 1, 2, norm=0)] if 1 < rows <= 16 else []
        for each in (choice, *few):
            parts = packed_linear_parts(x, weight, None, each)
            close(parts.sum(0) if parts.dim() == 3 else parts, product)
        gate, up = (product / scale).chunk(2, -1)
        choice = choose_packed(weight, "gate_up", rows)
        got = packed_gated_linear((x.double() / scale).bfloat16(), weight, None, "silu", choice)
        close(got, torch.nn.functional.silu(gate) * up, 4)  # the input is rounded once more
        if rows == 1:
            norm = torch.rand(columns, device="cuda").bfloat16(), 1e-5
            wide = x.double()
            normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            expected = normed * norm[0].double() @ exact.T
            residual = residual * scale.bfloat16()
            choice = choose_packed(weight, "qkv", rows)
            got = packed_linear(x, weight, None, choice, norm, residual)
            close(got, expected + residual.double(), 2)


@pytest.mark.parametrize("rows", [1, 33, 130])
def test_int4_with_scales_in_bfloat16_rounds_at_most_once(rows: int) -> None:
    """Tiny floats that masks make of codes keep their bits in all instructions; a program with 128
    rows rounds each number once, after its scale."""
    packed = random_weight("int4 128", 512, 1024, "cuda")
    packed = replace(packed, scales=packed.scales.bfloat16())
    weight, exact = prepare(packed), packed.dequantise().double()
    assert isinstance(weight, TiledWeight)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    choices: list[PackedChoice] = [Skinny(64, 256, 3, 4, 1, 64), Skinny(128, 256, 3, 8, 1, 64)]
    if rows == 1:
        choices += [Direct(1, 4, 1), Direct(2, 2, 2), Row(16, 3, 4, 1)]
    if rows == 130:
        choices += [Skinny(128, 256, 2, 8, 1, 128), Skinny(64, 256, 2, 4, 1, 128)]
    for choice in choices:
        numbers = exact
        if isinstance(choice, Skinny) and choice.block_m == 128:
            numbers = exact.bfloat16().double()  # gate and up round, see `packed_skinny._rounds`
        gate, up = (x.double() @ numbers.T).chunk(2, -1)
        got = packed_gated_linear(x, weight, None, "silu", choice)
        close(got, torch.nn.functional.silu(gate) * up, 2)


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks", "int4 128"])
def test_norm_and_residual_are_fused(name: str) -> None:
    weight, exact = made(name, 512, 1024)
    norm = torch.rand(1024, device="cuda").bfloat16(), 1e-5
    for rows in (1, 12):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        residual = torch.randn(rows, 512, device="cuda").bfloat16()
        wide = x.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm[0].double()
        expected = normed @ exact.T + residual.double()
        choices: list[PackedChoice] = [Skinny(64, 256, 3, 4, 1, 16, norm=1)]
        if rows == 1 and fits_gemv(weight):
            choices.append(Gemv(4, 1024, 4))
        if rows == 1:
            choices += [Row(16, 5, 4, 1), Direct(1, 4, 2)]
        for choice in choices:
            close(packed_linear(x, weight, None, choice, norm, residual), expected, 2)


@pytest.mark.parametrize("rows", [1, 9, 64])
def test_graphs_equal_eager(rows: int) -> None:
    """A chain of layers with dependent launches is bit-equal in 20 replays."""
    first, _ = made("int4 128 zeros", 2048, 1024)
    second, _ = made("fp8 blocks", 1024, 1024)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()

    def run() -> Tensor:
        stream = x
        for _ in range(8):
            act = packed_gated_linear(
                stream, first, None, "silu", choose_packed(first, "gate_up", rows)
            )
            parts = packed_linear_parts(act, second, None, choose_packed(second, "down", rows))
            down = (parts.sum(0) if parts.dim() == 3 else parts).float()
            # As a norm does: otherwise eight random layers overflow.
            stream = (down / down.abs().amax(1, keepdim=True)).to(x.dtype) + x
        return stream

    eager = run()
    assert eager.isfinite().all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.parametrize(
    ("name", "activations"), [("fp8 rows", "fp8-token"), ("int8 rows", "int8-token")]
)
def test_many_rows_multiply_codes_if_the_checkpoint_asks(name: str, activations: Any) -> None:
    packed = replace(random_weight(name, 512, 1000, "cuda"), activations=activations)
    weight = prepare(packed)
    assert isinstance(weight, TiledWeight)
    x = torch.randn(300, 1000, device="cuda").bfloat16()
    bias, residual = torch.randn(512, device="cuda").bfloat16(), torch.randn(300, 512).cuda()
    choice = choose_packed(weight, "down", 300)
    assert isinstance(choice, Quantised)
    exact = x.double() @ packed.dequantise().double().T
    close(packed_linear(x, weight, None, choice), exact, 10)
    got = packed_linear(x, weight, bias, choice, None, residual.bfloat16())
    close(got, exact + bias.double() + residual.double(), 10)
    few = choose_packed(weight, "down", 64)
    assert isinstance(few, Codes if name == "fp8 rows" else Skinny)
