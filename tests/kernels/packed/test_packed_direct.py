"""Rows whose weights go straight to registers, interpreted, equal products with exact numbers."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import pytest
import torch

from slipstream.kernels.linear.linear_choice import Skinny
from slipstream.kernels.packed.choice import choose_packed
from slipstream.kernels.packed.kinds import (
    GATE_UP,
    PARTS,
    PLAIN,
    Direct,
    fits_direct,
    fits_few_rows,
    fits_small_groups,
)
from slipstream.kernels.quant.tiled import tile

from ...cases import some
from ..linear.test_triton_linear import close, normed
from ..quant.random_weights import FORMATS, random_weight

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
NAMES = [name for name in FORMATS if fits_direct(tile(random_weight(name, 1, 1280)))]
# outputs, columns: the last rows and spans in part, or all of them whole; tiles of a program
CASES = [
    (name, mode, *size, tiles)
    for name in NAMES
    for mode in ("plain", "gated", "parts")
    for size in ((22, 1280), (32, 1024))
    for tiles in (1, 2)
]
KEPT = [
    ("int4 128", "plain", 22, 1280, 1),
    ("int4 64 zeros", "gated", 32, 1024, 2),
    ("int4 rows", "parts", 22, 1280, 2),
    ("fp8 rows", "gated", 22, 1280, 1),
    ("fp8 blocks", "parts", 32, 1024, 1),
]


@pytest.mark.parametrize(("name", "mode", "outputs", "size", "tiles"), some(CASES, kept=KEPT))
def test_products_are_those_of_the_exact_numbers(
    name: str, mode: str, outputs: int, size: int, tiles: int
) -> None:
    from slipstream.kernels.packed.triton.packed_direct import multiply

    packed = random_weight(name, outputs, size)
    weight, exact = tile(packed), packed.dequantise().double()
    x, bias = torch.randn(1, size).half(), torch.randn(outputs).half()
    norm, residual = (torch.rand(size).half(), 1e-5), torch.randn(1, outputs).half()
    if mode == "parts":
        parts = multiply(x, weight, Direct(tiles, 2, 1, split_k=2), PARTS, bias)
        assert parts.shape == (2, 1, outputs) and parts.dtype == torch.float32
        close(parts.sum(0), x.double() @ exact.T + bias)
        return
    product = normed(x, norm) @ exact.T + bias
    choice = Direct(tiles, 2, 2)
    if mode == "plain":
        got = multiply(x, weight, choice, PLAIN, bias, "", norm, residual)
        close(got, product + residual)
    else:
        gate, up = product.chunk(2, -1)
        got = multiply(x, weight, choice, GATE_UP, bias, "silu", norm)
        close(got, torch.nn.functional.silu(gate) * up)
    close(multiply(x, weight, choice), x.double() @ exact.T)


# For 8 rows of qkv, 16 of gates and 9 of o: words straight to registers, or the rows of a tile.
FEW: dict[str, list[object]] = {
    "int4 32 super": ["direct", 128, 128],
    "int5 32 super": ["direct", "direct", "direct"],
    "int6 16 super": ["direct", "direct", 128],
    "int4 32": [128, 64, 128],
    "int5 32": [64, 64, 64],
    "int8 32 offsets": [64, 64, 64],
}
SMALL = [name for name in FORMATS if fits_small_groups(tile(random_weight(name, 1, 1280)))]
SMALL_CASES = [
    (name, mode, *size)
    for name in SMALL
    for mode in ("plain", "gated", "parts")
    for size in ((22, 1320), (32, 1024))  # the last rows and units in part, or all of them whole
]
SMALL_KEPT = [
    ("int4 32 super", "plain", 22, 1320),
    ("int5 32 super", "gated", 22, 1320),
    ("int6 16 super", "parts", 32, 1024),
    ("int8 32 offsets", "plain", 22, 1320),
    ("int5 32", "parts", 22, 1320),
]


@pytest.mark.parametrize(("name", "mode", "outputs", "size"), some(SMALL_CASES, kept=SMALL_KEPT))
def test_small_groups_have_a_kernel_for_one_row(
    name: str, mode: str, outputs: int, size: int
) -> None:
    from slipstream.kernels.packed.planes.triton.direct_groups import multiply

    packed = random_weight(name, outputs, size)
    weight, exact = tile(packed), packed.dequantise().double()
    x, bias = torch.randn(1, size).half(), torch.randn(outputs).half()
    norm, residual = (torch.rand(size).half(), 1e-5), torch.randn(1, outputs).half()
    if mode == "parts":
        parts = multiply(x, weight, Direct(1, 2, 1, split_k=2), PARTS, bias)
        assert parts.shape == (2, 1, outputs) and parts.dtype == torch.float32
        close(parts.sum(0), x.double() @ exact.T + bias)
        return
    product = normed(x, norm) @ exact.T + bias
    choice = Direct(1, 2, 2)
    if mode == "plain":
        got = multiply(x, weight, choice, PLAIN, bias, "", norm, residual)
        close(got, product + residual, 2)  # it rounds the normed row
    else:
        gate, up = product.chunk(2, -1)
        got = multiply(x, weight, choice, GATE_UP, bias, "silu", norm)
        close(got, torch.nn.functional.silu(gate) * up, 2)
    close(multiply(x, weight, choice), x.double() @ exact.T)


@pytest.mark.parametrize("name", ["int4 32 super", "int5 32 super", "int6 16 super"])
def test_the_first_rows_of_a_matrix_are_multiplied_where_they_are(name: str) -> None:
    """A head is cut to the tokens that there are; its scales keep their strides."""
    from slipstream.kernels.packed.planes.triton import direct_groups
    from slipstream.kernels.packed.triton import packed_skinny
    from slipstream.kernels.quant.triton.widen import widen

    packed = random_weight(name, 40, 512)
    weight, exact = tile(packed).first_rows(19), packed.dequantise()[:19]
    x = torch.randn(3, 512).half()
    product = x.double() @ exact.double().T
    close(direct_groups.multiply(x[:1], weight, Direct(1, 2, 1)), product[:1])
    close(packed_skinny.multiply(x, weight, Skinny(16, 0, 3, 4, 1, 16)), product)
    assert torch.equal(widen(weight, torch.float32), exact)


FEW_CASES = [
    (name, mode, rows, *size)
    for name in SMALL
    if fits_few_rows(tile(random_weight(name, 1, 1280)))
    for mode in ("plain", "gated", "parts")
    for rows in (2, 11)
    for size in ((38, 1320, 2), (32, 1024, 1))  # outputs, columns, tiles
]
FEW_KEPT = [
    ("int4 32 super", "plain", 2, 38, 1320, 2),
    ("int5 32 super", "gated", 11, 38, 1320, 2),
    ("int6 16 super", "parts", 2, 32, 1024, 1),
    ("int8 32 offsets", "plain", 11, 32, 1024, 1),
    ("int5 32", "gated", 2, 32, 1024, 1),
]


@pytest.mark.parametrize(
    ("name", "mode", "rows", "outputs", "size", "tiles"), some(FEW_CASES, kept=FEW_KEPT)
)
def test_few_rows_of_small_groups(
    name: str, mode: str, rows: int, outputs: int, size: int, tiles: int
) -> None:
    from slipstream.kernels.packed.planes.triton.few_rows import multiply

    packed = random_weight(name, outputs, size)
    weight, exact = tile(packed), packed.dequantise().double()
    x, bias = torch.randn(rows, size).half(), torch.randn(outputs).half()
    product = x.double() @ exact.T + bias
    choice = Direct(tiles, 2, 1, norm=0)
    if mode == "parts":
        parts = multiply(x, weight, replace(choice, split_k=2), PARTS, bias)
        assert parts.shape == (2, rows, outputs) and parts.dtype == torch.float32
        close(parts.sum(0), product)
    elif mode == "plain":
        residual = torch.randn(rows, outputs).half()
        close(multiply(x, weight, choice, PLAIN, bias, "", residual), product + residual)
    else:
        gate, up = product.chunk(2, -1)
        got = multiply(x, weight, choice, GATE_UP, bias, "silu")
        close(got, torch.nn.functional.silu(gate) * up)


EMPTY_CASES = [
    ("direct_groups", name, 1, 1024, Direct(1, 4, 2 if "int6 16" in name else 1, split_k=2), 1)
    for name in SMALL  # as chosen for layers of at most 4,096 rows
] + [
    ("few_rows", name, 2, 4096, Direct(1, 8, 1, split_k=4, norm=0), 2 if "16" not in name else 4)
    for name in ("int4 32 super", "int5 32 offsets", "int6 16 super")
]
EMPTY_CASES += [
    ("few_rows", "int4 32 super", 9, 2048, Direct(2, 8, 1, split_k=4, norm=0), 1),
    ("direct_groups", "int8 32 offsets", 1, 1536, Direct(1, 2, 1, split_k=4), 3),
    ("packed_direct", "fp8 rows", 1, 1024, Direct(1, 4, 2, split_k=2), 1),
    ("packed_direct", "int4 128", 1, 2048, Direct(2, 4, 1, split_k=4), 2),
]
EMPTY_KEPT = [EMPTY_CASES[0], *(case for case in EMPTY_CASES if case[0] != "direct_groups")]


@pytest.mark.parametrize(
    ("kernel", "name", "rows", "size", "choice", "count"), some(EMPTY_CASES, kept=EMPTY_KEPT)
)
def test_no_program_loads_words_of_an_empty_part(
    kernel: str, name: str, rows: int, size: int, choice: Direct, count: int
) -> None:
    """The first parts have all columns if a step of all warps is longer than a part would be."""
    folder = "triton" if kernel == "packed_direct" else "planes.triton"
    module = importlib.import_module(f"slipstream.kernels.packed.{folder}.{kernel}")
    packed = random_weight(name, 32, size)
    x, bias = torch.randn(rows, size).half(), torch.randn(32).half()
    parts = module.multiply(x, tile(packed), choice, PARTS, bias)
    assert parts.shape == (count, rows, 32)
    close(parts.sum(0), x.double() @ packed.dequantise().double().T + bias)


def test_parts_of_a_split_share_all_units_and_none_is_empty() -> None:
    from slipstream.kernels.packed.triton.arguments import parts_of

    for case in itertools.product(range(1, 40), range(1, 9), (1, 2, 4, 8)):
        num_units, split_k, step = case
        count, units = parts_of(*case)
        assert count <= split_k and units % step == 0
        assert (count - 1) * units < num_units <= count * units


def test_few_rows_have_the_kernel_that_was_measured_for_their_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 8 rows of types with super scales load words straight; from then on it depends."""
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    weights = {name: tile(random_weight(name, 64, 4096)) for name in FEW}
    for name, expected in FEW.items():
        found = [
            choose_packed(weights[name], *case) for case in (("qkv", 8), ("gate_up", 16), ("o", 9))
        ]
        kernels = [
            "direct" if isinstance(choice, Direct) else choice.block_n
            for choice in found
            if isinstance(choice, Direct | Skinny)
        ]
        assert kernels == expected, name
    assert choose_packed(weights["int6 16 super"], "gate_up", 9) == Direct(2, 4, 1, norm=0)
    assert choose_packed(weights["int4 32"], "o", 2) == Skinny(128, 128, 3, 4, 8, 16)
    assert choose_packed(tile(random_weight("int4 32", 64, 2048)), "o", 2) != Skinny(
        128, 128, 3, 4, 8, 16
    )
    for weight in weights.values():
        assert isinstance(choose_packed(weight, "qkv", 17), Skinny)
        assert isinstance(choose_packed(weight, "head", 9), Skinny)
