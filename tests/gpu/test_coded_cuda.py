"""Coded rows and products of codes on a GPU equal the same in float64, and graphs replay them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import launch
from slipstream.kernels.packed.choice import choose_packed
from slipstream.kernels.packed.coded import (
    Coding,
    code_rows,
    code_rows_reference,
    decode_rows,
    norm_and_code,
    planes,
)
from slipstream.kernels.packed.coded_linear import coding_of
from slipstream.kernels.packed.kinds import Codes, Quantised, fits_roles
from slipstream.kernels.packed.linear import (
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
)
from slipstream.kernels.quant.tiled import TiledWeight, prepare

from ..kernels.quant.random_weights import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BF16 = torch.bfloat16
TILES = {
    9: (Codes(64, 128, 6, 4, 1, 16), Codes(128, 128, 5, 8, 1, 16), Codes(64, 128, 4, 4, 1, 8)),
    33: (Codes(64, 128, 6, 4, 1, 64), Codes(128, 128, 5, 8, 1, 64)),
    130: (Codes(128, 128, 4, 8, 1, 128), Codes(64, 128, 4, 4, 1, 128)),
}
ROLES = {  # of the kernel whose warps have roles
    9: (Codes(64, 128, 8, 4, 1, 64, roles=1), Codes(128, 128, 5, 4, 1, 64, roles=1)),
    130: (Codes(64, 128, 6, 4, 1, 128, roles=1), Codes(128, 128, 4, 4, 1, 128, roles=1)),
    257: (Codes(64, 128, 3, 4, 1, 64, roles=1), Codes(128, 128, 2, 4, 1, 128, roles=1)),
}
CASES = [*((rows, False) for rows in TILES), *((rows, True) for rows in ROLES)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill freed memory with NaN, and enable dependent launches, the harder case."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")
    monkeypatch.setattr(launch, "pdl_wanted", lambda: True)


def made(name: str, rows: int, columns: int) -> tuple[TiledWeight, Tensor]:
    """A weight whose checkpoint asks for codes, and its exact numbers."""
    packed = random_weight(name, rows, columns, "cuda")
    asks: Any = "fp8-token" if name == "fp8 rows" else "fp8-block"
    weight = prepare(replace(packed, activations=asks))
    assert isinstance(weight, TiledWeight)
    return weight, packed.dequantise().double()


def close(got: Tensor, exact: Tensor, bound: float = 4e-3) -> None:
    error = (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-6)
    assert got.isfinite().all() and (error < bound).all(), error.max()


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("size", [128, 1352, 4096, 14336])
def test_coded_rows_are_those_of_the_reference(size: int, by_group: bool) -> None:
    x = torch.randn(9, size, device="cuda").bfloat16()
    x[3], x[4, 0] = 0, 30_000
    coding = Coding(size, by_group)
    coded = code_rows(x, coding)
    end = coding.num_codes + 4 * (coding.spans if by_group else 1)
    assert torch.equal(coded[:, :end], code_rows_reference(x, coding)[:, :end])
    weight = torch.rand(size, device="cuda").bfloat16()
    parts = torch.randn(3, 9, size, device="cuda")
    normed, stream = norm_and_code(parts, x, weight, 1e-5, coding)
    total = (parts.sum(0) + x.float()).bfloat16()
    wide = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    close(stream, total.double())
    close(decode_rows(normed, coding), wide * weight.double(), 0.05)


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """Skip what needs a Hopper GPU on others."""
    of_roles = getattr(request.node, "callspec", None)
    if of_roles is not None and of_roles.params.get("roles"):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize(("rows", "roles"), CASES)
@pytest.mark.parametrize("size", [1024, 1352])
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
def test_products_are_those_of_the_codes(name: str, size: int, rows: int, roles: bool) -> None:
    weight, exact = made(name, 640, size)
    x, bias = torch.randn(rows, size, device="cuda").bfloat16(), torch.randn(640, device="cuda")
    bias, residual = bias.bfloat16(), torch.randn(rows, 640, device="cuda").bfloat16()
    for tile in (ROLES if roles else TILES)[rows]:
        forms = [tile]
        if name == "fp8 rows":
            forms += [replace(tile, by_group=0), replace(tile, by_group=0, promote=0)]
        for choice in forms:
            coding = coding_of(weight, choice)
            coded = code_rows(x, coding)
            product = decode_rows(coded, coding).double() @ exact.T
            got = packed_linear(coded, weight, bias, choice, None, residual, BF16)
            close(
                got, product + bias.double() + residual.double(), 4e-3 if choice.promote else 8e-3
            )
            parts = packed_linear_parts(coded, weight, None, replace(choice, split_k=3), dtype=BF16)
            assert parts.shape == (3, rows, 640)
            # the tensor cores keep about 14 bits of the sum of a step, or of all
            close(parts.sum(0), product, 1e-3 if choice.promote else 4e-3)
            if roles:
                narrow = replace(choice, split_k=3, narrow=1)
                parts = packed_linear_parts(coded, weight, None, narrow, dtype=BF16)
                assert parts.dtype == BF16
                close(parts.double().sum(0), product, 8e-3)
            if roles and not fits_roles(weight, "gate_up", choice.block_n):
                continue
            gate, up = product.chunk(2, -1)
            act = torch.nn.functional.silu(gate) * up
            got = packed_gated_linear(coded, weight, None, "silu", choice, None, BF16)
            close(got, act, 8e-3 if choice.promote else 1.6e-2)
            if tile.block_m == 128 and roles and not (choice.by_group or choice.promote):
                joined = replace(choice, joined=1)
                both = packed_gated_linear(coded, weight, None, "silu", joined, None, BF16)
                close(both, got.double(), 8e-3)
            if choice.block_n == 128:
                wants = Coding(320, True)
                out = packed_gated_linear(coded, weight, None, "silu", choice, None, BF16, wants)
                end = wants.num_codes + 4 * wants.spans
                assert torch.equal(out[:, :end], code_rows_reference(got, wants)[:, :end])


@pytest.mark.parametrize(
    ("name", "rows", "size"),
    [("fp8 rows", 300, 1352), ("fp8 rows", 1000, 1352)]
    + [("fp8 blocks", rows, 1536) for rows in (257, 258, 300, 1027)],
)
def test_torch_multiplies_codes_that_norms_and_gates_have_written(
    name: str, rows: int, size: int
) -> None:
    first, wide = made(name, 2048, size)
    second, exact = made(name, 640, 1024)
    up, down = (choose_packed(w, role, rows) for w, role in ((first, "gate_up"), (second, "down")))
    assert isinstance(up, Quantised) and isinstance(down, Quantised)
    x, gain = torch.randn(rows, size, device="cuda").bfloat16(), torch.ones(size, device="cuda")
    by_group = name == "fp8 blocks"
    coding, after = Coding(size, by_group, planar=True), Coding(1024, by_group, planar=True)
    coded, _ = norm_and_code(torch.zeros_like(x), x, gain.bfloat16(), 1e-5, coding)
    for got, expected in zip(
        planes(code_rows(x, coding), coding), planes(code_rows_reference(x, coding), coding),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(got[:rows].view(torch.uint8), expected[:rows].view(torch.uint8))
    gate, other = (decode_rows(coded, coding).double() @ wide.T).chunk(2, -1)
    for wants in (Coding(1024, True), after):
        act = packed_gated_linear(coded, first, None, "silu", up, None, BF16, wants)
        close(decode_rows(act, wants), torch.nn.functional.silu(gate) * other, 0.05)
    got = packed_linear(act, second, None, down, dtype=BF16)
    close(got, decode_rows(act, after).double() @ exact.T, 8e-3)


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
def test_a_row_does_not_depend_on_others(name: str, roles: bool) -> None:
    """Within a kernel, neither the other rows nor their number change the bits of a row."""
    weight, _ = made(name, 512, 1024)
    x = torch.randn(33, 1024, device="cuda").bfloat16()
    choice = ROLES[9][0] if roles else TILES[33][0]
    whole = packed_linear(x, weight, None, choice)
    for start, stop in ((0, 2), (5, 22), (32, 33)):
        assert torch.equal(packed_linear(x[start:stop], weight, None, choice), whole[start:stop])


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks"])
@pytest.mark.parametrize(("rows", "roles"), CASES)
def test_graphs_equal_eager(name: str, rows: int, roles: bool) -> None:
    """A chain of layers that hand codes on, with dependent launches, is bit-equal in 20 replays."""
    first, second = made(name, 2048, 1024)[0], made(name, 1024, 1024)[0]
    tiles = (ROLES if roles else TILES)[rows]
    up = next(tile for tile in tiles if tile.block_n == 128)
    up = replace(up, stages=3, by_group=int(name == "fp8 blocks"))
    down = replace(tiles[0], split_k=2)
    x, gain = torch.randn(rows, 1024, device="cuda").bfloat16(), torch.rand(1024, device="cuda")
    gain = gain.bfloat16()

    def run() -> Tensor:
        hidden, stream = torch.zeros_like(x), x
        for _ in range(8):
            coded, stream = norm_and_code(hidden, stream, gain, 1e-5, coding_of(first, up))
            act = packed_gated_linear(
                coded, first, None, "silu", up, None, BF16, coding_of(second, down)
            )
            hidden = packed_linear_parts(act, second, None, down, None, BF16)
        return norm_and_code(hidden, stream, gain, 1e-5, Coding(1024, True))[1]

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
