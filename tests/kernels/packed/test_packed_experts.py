"""Experts of fp4 numbers, interpreted, equal the same experts with all numbers in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.kernels.linear.experts import PackedExperts
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.packed.experts import packed_expert_parts
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import TiledWeight, tile

from ...cases import some

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about overflow
]
HIDDEN, INNER = 288, 32  # the last span of a row is not full


def random_matrix(rows: int, columns: int) -> PackedWeight:
    """Numbers around 0.06."""
    values = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(119, 123, (rows, columns // 32), dtype=torch.uint8)
    return PackedWeight("fp4", values, scales, columns, 32)


def random_experts(count: int) -> PackedExperts:
    gate_up, down = random_matrix(count * 2 * INNER, HIDDEN), random_matrix(count * HIDDEN, INNER)
    biases = torch.randn(count, 2 * INNER) * 4, torch.randn(count, HIDDEN)
    return PackedExperts(gate_up, down, count, *biases, "clamped_swiglu")


@pytest.mark.parametrize(
    ("rows", "count", "top_k", "dtype"),
    some(
        [
            (*sizes, dtype)
            for sizes, dtype in itertools.product(
                [(1, 4, 2), (3, 5, 2), (40, 3, 2)], [torch.float32, torch.float16]
            )
        ],
        kept=[(1, 4, 2, torch.float32), (3, 5, 2, torch.float16)],
    ),
)
def test_parts_add_up_to_those_of_wide_experts(
    rows: int, count: int, top_k: int, dtype: torch.dtype
) -> None:
    from slipstream.kernels.packed.triton.packed_experts import expert_parts

    packed, x = random_experts(count), torch.randn(rows, HIDDEN).to(dtype)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k)
    wide = packed.widened(torch.float32)
    expected = run_experts_reference(x.float(), wide, weights, ids)
    tiled = PackedExperts(
        tile(packed.gate_up), tile(packed.down), count, packed.gate_up_bias, packed.down_bias,
        "clamped_swiglu",
    )  # fmt: skip
    assert isinstance(tiled.gate_up, TiledWeight)
    torch.testing.assert_close(tiled.widened(torch.float32).gate_up, wide.gate_up)
    parts = expert_parts(x, tiled, weights, ids.int(), spare=1)
    assert parts.shape == (top_k + 1, rows, HIDDEN)
    error = (parts[:top_k].sum(0) - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 3e-3)


def test_without_kernels_the_numbers_are_widened() -> None:
    packed, x = random_experts(3), torch.randn(4, HIDDEN)
    weights, ids = torch.rand(4, 2), torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0]])
    expected = run_experts_reference(x, packed.widened(torch.float32), weights, ids)
    assert torch.equal(packed_expert_parts(x, packed, weights, ids), expected)
