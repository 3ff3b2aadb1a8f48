"""Products of many rows for Hopper GPUs: the kernel, its roles run as threads, equals torch, and it
is chosen where it can run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels.linear import linear, linear_choice, linear_tuned
from slipstream.kernels.linear.fixed import FixedChooser
from slipstream.kernels.linear.linear_choice import Fixed, Shape, Wide, fits
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.kernels.linear.wide import products

from ..gluon_threads import ThreadedKernel

GATE_UP, DOWN = Shape("gate_up", 28672, 4096), Shape("down", 4096, 14336)


@pytest.fixture
def kernel(triton_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel, which runs on the CPU."""
    from slipstream.kernels.linear.wide.triton import hopper_product

    ThreadedKernel(hopper_product, "_hopper_product_kernel").replace(monkeypatch)
    return hopper_product


@pytest.mark.parametrize(
    ("activation", "rows", "outputs", "inputs", "programs", "choice"),
    [
        (None, 300, 200, 328, 4, Wide(128, 4, 2)),  # four whole tiles, and halves of two
        (None, 129, 328, 512, 3, Wide(256, 3, 1)),
        (None, 257, 72, 648, 1, Wide(128, 6, 2, lag=2, halves=0)),
        (None, 383, 64, 456, 9, Wide(128, 4, lag=1)),  # halves only, and some of them empty
        ("silu", 300, 200, 328, 9, Wide(128, 4, 2, lag=1)),
        ("silu", 383, 136, 456, 4, Wide(256, 4)),
        ("silu", 129, 72, 520, 2, Wide(128, 3, 1, halves=0)),
        ("gelu_tanh", 257, 72, 648, 4, Wide(128, 6, lag=2)),
    ],
    ids=str,
)
def test_it_equals_torch(
    kernel: Any,
    activation: str | None,
    rows: int,
    outputs: int,
    inputs: int,
    programs: int,
    choice: Wide,
) -> None:
    """Rows, outputs and inputs are odd, and rows of x and of the weights lie apart."""
    x = torch.randn(rows, inputs + 8)[:, :inputs].bfloat16()
    weight = torch.randn(outputs if activation is None else 2 * outputs, inputs + 16)
    weight = (weight[:, :inputs] * inputs**-0.5).bfloat16()
    out = kernel.multiply(x, weight, choice, activation, programs)
    expected = F.linear(x.double(), weight.double())
    if activation is not None:
        gate, up = expected.chunk(2, -1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        expected = gate * up
    assert out.shape == (rows, outputs) and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=2e-5)


def test_the_last_tiles_are_divided_if_all_halves_run_at_once(kernel: Any) -> None:
    divide = kernel._divide_tiles
    assert divide(2688, 132, 1) == (2640, 96)  # gate_up of 3,000 rows: 48 tiles in the last round
    assert divide(896, 132, 1) == (896, 0)  # 104 tiles, whose halves would need two rounds
    assert divide(64, 132, 1) == (0, 128) and divide(66, 132, 1) == (0, 132)
    assert divide(132, 132, 1) == (132, 0) and divide(2688, 132, 0) == (2688, 0)


def test_gates_far_from_zero_stay_finite(kernel: Any) -> None:
    """The exponential of such a gate overflows."""
    x = torch.zeros(128, 320)
    x[:, 0] = torch.linspace(-400, 400, 128)
    weight = torch.zeros(128, 320)
    weight[:, 0] = 1
    out = kernel.multiply(x.bfloat16(), weight.bfloat16(), Wide(128), "silu", 1)
    gate = x[:, :1].bfloat16().double()
    expected = (F.silu(gate) * gate).expand(-1, 64)
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=1e-30)


def test_it_fits_layers_that_fill_its_ring() -> None:
    wide = Wide()
    assert fits(wide, GATE_UP, 257) and fits(wide, DOWN, 8192)
    assert not fits(wide, GATE_UP, 256)  # a bucket of the kernels for few rows
    assert not fits(wide, Shape("gate_up", 4104, 4096), 512)  # 2,052 outputs in rows of 16 bytes
    assert fits(wide, Shape("down", 4104, 4096), 512)
    assert not fits(wide, Shape("o", 4096, 256), 512)
    assert fits(wide, Shape("o", 4096, 320), 512) and not fits(
        Wide(lag=1), Shape("o", 64, 320), 512
    )


def test_a_chooser_names_it_for_many_rows_of_its_roles() -> None:
    chooser = LinearChooser({}, None, {"gate_up": (512, Wide())})
    assert chooser.choose(GATE_UP, 512) == chooser.choose(GATE_UP, 8192) == Wide()
    for shape, rows in ((GATE_UP, 511), (GATE_UP, 64), (DOWN, 8192)):
        assert chooser.choose(shape, rows) is None
    assert LinearChooser({}).choose(GATE_UP, 8192) is None
    # Rows of `--batch-invariant` have the same bits in every company, by kernels of their own.
    assert isinstance(FixedChooser().choose(GATE_UP, 8192), Fixed)


def test_only_hopper_gpus_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(capability: tuple[int, int], role: str = "gate_up") -> object:
        card = SimpleNamespace(capability=capability, num_processors=132, name="a GPU")
        monkeypatch.setattr(linear_tuned, "card_of", lambda _: card)
        monkeypatch.setattr(linear_tuned, "use_triton", lambda _: True)
        monkeypatch.setattr(linear_tuned, "load_tuned", lambda *_: {(DOWN, 1): None})
        chooser = linear_tuned.create_chooser("auto", torch.device("cpu"), torch.bfloat16)
        assert chooser is not None
        return chooser.choose(Shape(role, 28672, 4096), 3000)

    monkeypatch.setattr(linear_tuned, "WIDE", {"gate_up": (512, Wide())})
    assert chosen((9, 0)) == Wide()
    assert chosen((9, 0), "down") is None and chosen((8, 9)) is None and chosen((10, 0)) is None
    for least, wide in linear_choice.WIDE.values():
        assert least > 256 and 2 <= wide.stages <= 6


def test_layers_reach_it_and_torch_computes_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a bias, and tensors that the copy engine cannot read."""
    called: list[str | None] = []

    def multiply(x: Any, weight: Any, choice: Wide, activation: str | None = None) -> torch.Tensor:
        called.append(activation)
        return products.multiply_reference(x, weight, choice, activation)

    monkeypatch.setattr(linear, "multiply", multiply)
    monkeypatch.setattr(linear, "use_triton", lambda _: True)
    x, weight, residual = torch.randn(300, 64), torch.randn(32, 64), torch.randn(300, 32)
    wide, bias, norm = Wide(), torch.randn(32), (torch.rand(64), 1e-5)
    for options in ({}, {"norm": norm}, {"norm": norm, "residual": residual}):
        got = linear.linear(x, weight, None, wide, **options)
        torch.testing.assert_close(got, linear.linear_reference(x, weight, **options))
    torch.testing.assert_close(linear.linear_parts(x, weight, None, wide), x @ weight.T)
    for activation in ("silu", "gelu_tanh"):
        got = linear.gated_linear(x, weight, None, activation, wide, norm)
        expected = linear.gated_linear_reference(x, weight, None, activation, norm)
        torch.testing.assert_close(got, expected)
    assert called == [None] * 4 + ["silu", "gelu_tanh"]
    for call in (linear.linear, linear.gated_linear):
        assert call(x, weight, bias, choice=wide).shape[0] == 300
    assert len(called) == 6

    card = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(products, "card_of", lambda _: card)
    monkeypatch.setattr(products, "use_triton", lambda _: True)
    half = torch.empty(300, 64, dtype=torch.bfloat16)
    assert products._fits(half, half, wide)
    assert not products._fits(x, weight, wide) and not products._fits(half, weight, wide)
    assert not products._fits(half[:, 1:], half[:, 1:], wide)
    card.capability = (10, 0)
    assert not products._fits(half, half, wide)
