"""The compiled kernel that computes all products between two attentions of few rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels import launch
from slipstream.kernels.packed.persistent.row_layer import multiply_row_reference
from slipstream.kernels.packed.persistent.row_weights import RowLayer, fits_row_layer
from slipstream.kernels.quant.tiled import TiledWeight, tile

from ..kernels.quant.random_weights import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PATIENCE = 10**8 // 1024  # of programs that wait for others, times 1024 cycles
SIZES = ((256, 512, 2304, 336), (4096, 4096, 14336, 6144))  # heads, hidden, inner, outputs of qkv


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill freed memory with NaN, and enable dependent launches, the harder case."""
    for size in (1 << 12, 1 << 16, 1 << 20):
        torch.full((size,), float("nan"), device="cuda")
    monkeypatch.setattr(launch, "pdl_wanted", lambda: True)


def matrix_of(name: str, rows: int, columns: int, seed: int) -> TiledWeight:
    """A random matrix whose products with a row have about its deviation."""
    found = tile(random_weight(name, rows, columns, "cuda", seed=seed))
    return replace(found, scales=found.scales / columns**0.5)


def layer_of(name: str, sizes: tuple[int, int, int, int]) -> RowLayer:
    heads, hidden, inner, outputs = sizes
    shapes = ((hidden, heads), (2 * inner, hidden), (hidden, inner), (outputs, hidden))
    weights = [matrix_of(name, *shape, seed=i) for i, shape in enumerate(shapes)]
    norms = [(torch.rand(hidden, device="cuda").bfloat16() + 0.5, 1e-5 * (1 + i)) for i in (0, 1)]
    layer = RowLayer(*weights, *norms)
    assert fits_row_layer(layer, torch.bfloat16, torch.device("cuda", 0))
    return layer


def close(got: Tensor | None, exact: Tensor | None) -> None:
    assert got is not None and exact is not None and got.shape == exact.shape
    error = float(((got.float() - exact).norm(dim=1) / exact.norm(dim=1)).max())
    assert error < 0.01, error  # of the rounding of each product's input


@pytest.mark.parametrize("name", ["int4 128", "fp8 rows"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_chains_equal_the_plain_version(
    name: str, sizes: tuple[int, int, int, int], rows: int
) -> None:
    """Eagerly and in a graph, whose replays have the same bits: no program overtakes another."""
    from slipstream.kernels.packed.persistent.triton.hopper_row import multiply

    layer = layer_of(name, sizes)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    factors = torch.arange(1, rows + 1, device="cuda")[:, None]  # rows have norms of their own
    x = (torch.randn(rows, sizes[0], device="cuda") * factors).bfloat16()
    residual = (torch.randn(rows, sizes[1], device="cuda") * factors).bfloat16()
    run = partial(multiply, x, counter=counter, patience=PATIENCE)
    last = replace(layer, qkv=None, next_norm=None)

    def chain() -> list[Tensor]:
        stream, kept = residual, []
        for own in (layer, layer, last):
            stream, qkv = run(stream, own)
            kept += [stream] if qkv is None else [stream, qkv]
        return kept

    eager = chain()
    torch.cuda.synchronize()
    stream = residual
    for index in (0, 2):
        exact = multiply_row_reference(x.float(), stream.float(), layer)
        close(eager[index], exact[0])
        close(eager[index + 1], exact[1])
        stream = eager[index]
    close(eager[4], multiply_row_reference(x.float(), stream.float(), last)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(300):
        for kept in captured:
            kept.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.parametrize("name", ["int4 128", "fp8 rows"])
def test_no_row_depends_on_another(name: str) -> None:
    from slipstream.kernels.packed.persistent.triton.hopper_row import multiply

    layer = layer_of(name, SIZES[1])
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    x, residual = (torch.randn(4, size, device="cuda").bfloat16() for size in SIZES[1][:2])
    run = partial(multiply, layer=layer, counter=counter, patience=PATIENCE)
    whole = run(x, residual)
    x[1], residual[1] = float("nan"), float("inf")
    for rows in ([0, 1, 2, 3], [0, 2, 3]):  # a compiled form has three rows and four
        for part, of_whole in zip(run(x[rows], residual[rows]), whole, strict=True):
            assert part is not None and of_whole is not None
            for at, row in enumerate(rows):
                assert row == 1 or torch.equal(part[at], of_whole[row])
