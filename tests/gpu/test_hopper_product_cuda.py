"""Products of many rows by the kernel for Hopper GPUs equal torch's, also replayed in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.linear.linear import gated_linear, linear
from slipstream.kernels.linear.linear_choice import Shape, Wide, fits
from slipstream.kernels.linear.wide import products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
TILES = [
    Wide(),
    Wide(256, 3, 2),
    Wide(256, 4, 8, lag=1),
    Wide(128, 6),
    Wide(128, 6, lag=2, halves=0),
]
SIZES = [  # rows, outputs, inputs
    (257, 2048, 1024),
    (480, 14336, 4096),
    (1000, 1000, 712),  # no multiple of any tile
    (3001, 4096, 4104),
    (8191, 520, 2048),
]


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weight = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    return x, weight.bfloat16()


def close(got: Tensor, exact: Tensor) -> None:
    """One rounding to 16 bits: in the whole, in each row and in each column of the output."""
    assert got.shape == exact.shape
    difference = (got.float() - exact).square()
    for of in (..., 0, 1):
        total = difference.sum() if of is ... else difference.sum(of)
        size = exact.square().sum() if of is ... else exact.square().sum(of)
        assert float((total / size).max()) < (4e-3 if of is ... else 8e-3) ** 2


@pytest.mark.parametrize("choice", TILES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_it_equals_torch(rows: int, outputs: int, inputs: int, choice: Wide) -> None:
    assert fits(choice, Shape("o", outputs, inputs), rows)
    x, weight = operands(rows, outputs, inputs)
    assert products._fits(x, weight, choice)
    torch.full((rows, outputs), float("nan"), device="cuda")  # freed, and used for the result
    close(linear(x, weight, None, choice), x.float() @ weight.float().T)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("choice", TILES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_it_applies_the_activation(
    rows: int, outputs: int, inputs: int, choice: Wide, activation: str
) -> None:
    assert fits(choice, Shape("gate_up", 2 * outputs, inputs), rows)
    x, weight = operands(rows, 2 * outputs, inputs)
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(gated_linear(x, weight, None, activation, choice), gate * up)


def test_half_precision_and_rows_that_lie_apart() -> None:
    x, weight = operands(700, 1024, 1032)
    x, weight = x.half()[:, 8:], weight.half()[:, :1024]
    exact = x.float() @ weight.float().T
    close(products.multiply(x, weight, Wide()), exact)


def test_a_graph_multiplies_new_rows() -> None:
    x, weight = operands(1224, 4096, 2048)
    products.multiply(x, weight, Wide(), "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = products.multiply(x, weight, Wide(), "silu")
        second = products.multiply(first, weight, Wide(lag=1))
    for _ in range(20):
        x.normal_()
        graph.replay()
        gate, up = (x.float() @ weight.float().T).chunk(2, -1)
        close(first, F.silu(gate) * up)
        close(second, first.float() @ weight.float().T)


def test_a_row_has_the_same_bits_in_every_company() -> None:
    """Not promised, but a difference would say that a tile read what is not its own."""
    x, weight = operands(2000, 2048, 2048)
    whole = products.multiply(x, weight, Wide(), "silu")
    for rows in (257, 1000, 1999):
        assert torch.equal(products.multiply(x[:rows], weight, Wide(), "silu"), whole[:rows])
