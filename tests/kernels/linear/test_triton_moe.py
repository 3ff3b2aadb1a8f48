"""Triton's grouped matrix product over experts, interpreted, equals the reference."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear import moe

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about overflow
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (40, 4, 2), (7, 3, 3)])
def test_run_experts(
    tokens: int, experts: int, top_k: int, activation: str, dtype: torch.dtype
) -> None:
    from slipstream.kernels.linear.triton.moe import run_experts

    x = torch.randn(tokens, 72).to(dtype)
    gate_up = (torch.randn(experts, 2 * 40, 72) / 8).to(dtype)
    down = (torch.randn(experts, 72, 40) / 6).to(dtype)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k)
    args = (x, gate_up, down, weights, ids, activation)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    expected = moe.run_experts_reference(*args)
    torch.testing.assert_close(run_experts(*args), expected, rtol=tolerance, atol=tolerance)


def test_experts_of_one_token_each_and_experts_without_any() -> None:
    from slipstream.kernels.linear.triton.moe import run_experts

    x, weights = torch.randn(3, 32), torch.ones(3, 1)
    gate_up, down = torch.randn(64, 2 * 16, 32) / 6, torch.randn(64, 32, 16) / 4
    ids = torch.tensor([[63], [0], [40]])
    expected = moe.run_experts_reference(x, gate_up, down, weights, ids)
    got = run_experts(x, gate_up, down, weights, ids)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not run_experts(x[:0], gate_up, down, weights[:0], ids[:0]).numel()
