"""Experts of every quantised format, interpreted, equal the same experts with plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import ExpertWeights, PackedExperts
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.packed.experts import packed_expert_parts, packed_experts
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.stack import empty_stack, fill_rows
from slipstream.kernels.quant.tiled import TiledWeight, tile

from ...cases import some
from ..quant.random_weights import FORMATS, random_weight

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about overflow
]
HIDDEN, INNER = 160, 64  # the last span of a row is not full


def random_experts(name: str, count: int, biases: bool = True) -> PackedExperts:
    """Experts whose rows of blocks share no scale with another expert's."""
    sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    stacks = []
    for rows, columns in sizes:
        parts = [random_weight(name, rows, columns, seed=7 * e + rows) for e in range(count)]
        whole = rows % parts[0].row_group == 0  # blocks of rows
        parts = [tile(part if whole else part.by_rows()) for part in parts]
        stack = empty_stack(parts[0], count * rows)
        for expert, part in enumerate(parts):
            fill_rows(stack, expert * rows, part)
        stacks.append(stack)
    own = (torch.randn(count, 2 * INNER), torch.randn(count, HIDDEN)) if biases else (None, None)
    return PackedExperts(*stacks, count, *own, "clamped_swiglu" if biases else "silu")


def expected_of(x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor) -> Tensor:
    wide = experts.widened(torch.float32)
    assert isinstance(wide, ExpertWeights)
    return run_experts_reference(x.float(), wide, weights, ids)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


# format, rows, experts, experts of a row, TMA
CASES = [
    (name, *sizes)
    for name in FORMATS
    for sizes in ((1, 3, 2, True), (2, 3, 2, False), (40, 3, 2, True))
]
KEPT = [
    ("fp8 blocks", 2, 3, 2, False),
    ("int4 64 zeros", 1, 3, 2, True),
    ("int4 32 super", 2, 3, 2, False),
    ("nvfp4", 2, 3, 2, False),
]


@pytest.mark.parametrize(("name", "rows", "count", "top_k", "tma"), some(CASES, kept=KEPT))
def test_parts_add_up_to_those_of_wide_experts(
    name: str, rows: int, count: int, top_k: int, tma: bool
) -> None:
    from slipstream.kernels.linear.triton.moe import Tiles
    from slipstream.kernels.packed.triton.packed_experts import expert_parts

    experts, x = random_experts(name, count), torch.randn(rows, HIDDEN).half()
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k)
    tiles = None if rows == 1 else (Tiles(64, 0, 3, 4), Tiles(64, 0, 3, 4))  # fewer programs
    parts = expert_parts(x, experts, weights, ids.int(), spare=1, tiles=tiles, tma=tma)
    assert parts.shape == (top_k + 1, rows, HIDDEN)
    assert relative(parts[:top_k].sum(0), expected_of(x, experts, weights, ids)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "int4 128 zeros"])
def test_tiles_of_many_rows_round_scaled_numbers(name: str) -> None:
    from slipstream.kernels.packed.triton.packed_experts import expert_parts

    experts, x = random_experts(name, 2, biases=False), torch.randn(300, HIDDEN).half()
    ids, weights = torch.randint(0, 2, (300, 1)), torch.rand(300, 1)
    got = expert_parts(x, experts, weights, ids)
    assert got.shape == x.shape
    assert relative(got, expected_of(x, experts, weights, ids)) < 3e-3


@pytest.mark.parametrize("rows", some([1, 3], kept=[3]))
def test_absent_experts_are_left_out(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x = random_experts("fp8 rows", 3), torch.randn(rows, HIDDEN).half()
    weights, ids = torch.rand(rows, 2), torch.tensor([[-1, 0], [-1, 2], [-1, -1]])[:rows]
    expected = expected_of(x, experts, weights, ids)
    for triton in ("1", "0"):
        monkeypatch.setenv("SLIPSTREAM_TRITON", triton)
        assert relative(packed_experts(x, experts, weights, ids, absent=True), expected) < 3e-3


def test_without_kernels_experts_are_widened_one_by_one() -> None:
    packed, x = random_experts("mxfp4", 3), torch.randn(4, HIDDEN)
    weights, ids = torch.rand(4, 2), torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0]])
    expected = expected_of(x, packed, weights, ids)
    assert torch.equal(packed_expert_parts(x, packed, weights, ids), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [129, 320])
def test_a_stack_holds_every_number(name: str, columns: int) -> None:
    rows = 128 if FORMATS[name].get("row_group") else 5
    parts = [random_weight(name, rows, columns, seed=seed) for seed in range(3)]
    exact = torch.cat([part.dequantise() for part in parts])
    for made in (parts, [tile(part) for part in parts]):
        stack = empty_stack(made[0], 3 * rows)
        for index in (2, 0, 1):
            fill_rows(stack, index * rows, made[index])
        assert torch.equal(stack.dequantise(), exact)
        assert isinstance(stack, TiledWeight | PackedWeight)
        assert replace(stack).nbytes == sum(part.nbytes for part in made)
