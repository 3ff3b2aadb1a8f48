"""Triton's grouped matrix product over experts, interpreted, equals the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.kernels.linear import moe
from slipstream.kernels.linear.experts import ACTIVATIONS, ExpertWeights

from ...cases import some

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about overflow
]
SIZES = [(1, 8, 2), (40, 4, 2), (7, 3, 3)]  # tokens, experts, top k


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    some(
        itertools.product(SIZES, ACTIVATIONS, (torch.float32, torch.float16)),
        kept=[
            (SIZES[0], "silu", torch.float16),
            (SIZES[1], "clamped_swiglu", torch.float32),
            (SIZES[2], "gelu_tanh", torch.float16),
        ],
    ),
)
def test_run_experts(size: tuple[int, int, int], activation: str, dtype: torch.dtype) -> None:
    """The last activation with biases."""
    from slipstream.kernels.linear.triton.moe import run_experts

    tokens, experts, top_k = size
    x = torch.randn(tokens, 72).to(dtype)
    stacks = [torch.randn(experts, 2 * 40, 72) / 8, torch.randn(experts, 72, 40) / 6]
    if activation == "clamped_swiglu":
        stacks += [torch.randn(experts, 2 * 40) * 4, torch.randn(experts, 72)]
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k)
    of = ExpertWeights(*(stack.to(dtype) for stack in stacks), activation=activation)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    expected = moe.run_experts_reference(x, of, weights, ids)
    got = run_experts(x, of, weights, ids)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_experts_of_one_token_each_and_experts_without_any() -> None:
    from slipstream.kernels.linear.triton.moe import run_experts

    x, weights = torch.randn(3, 32), torch.ones(3, 1)
    of = ExpertWeights(torch.randn(64, 2 * 16, 32) / 6, torch.randn(64, 32, 16) / 4)
    ids = torch.tensor([[63], [0], [40]])
    expected = moe.run_experts_reference(x, of, weights, ids)
    got = run_experts(x, of, weights, ids)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not run_experts(x[:0], of, weights[:0], ids[:0]).numel()
