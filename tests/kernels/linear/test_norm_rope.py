"""RMSNorm, rotary embedding and gated activations equal their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.activation import gelu_tanh_and_mul, silu_and_mul
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm, rms_norm, rotary_embedding
from slipstream.kernels.linear.rotation import Rotation


@pytest.mark.parametrize("shape", [(1, 32), (7, 48), (3, 5, 24)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    scaled = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-3).double(), scaled * weight, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(rms_norm(x, None, 1e-3).double(), scaled, atol=1e-5, rtol=1e-5)


def test_rms_norm_in_bf16_is_computed_in_fp32() -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 256) * 100).bfloat16()
    scaled = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = torch.full((256,), 1.003)  # a weight that bf16 would round to 1
    for weight in (torch.ones(256).bfloat16(), exact):
        same = rms_norm(x, weight, 1e-6) == (scaled * weight.float()).bfloat16()
        assert same.float().mean() > 0.99  # a tie may round either way
    assert (rms_norm(x, exact, 1e-6) != scaled.bfloat16()).float().mean() > 0.2


def test_fused_add_rms_norm_returns_the_sum() -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total = x + residual
    normed, new_residual = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(new_residual, total)
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [8, 12])
def test_rotary_turns_each_pair_by_its_angle(interleaved: bool, rot_dim: int) -> None:
    dim, half = 12, rot_dim // 2
    angles = torch.outer(torch.arange(50).double(), 0.7 ** torch.arange(half).double())
    cache = torch.cat((angles.cos(), angles.sin()), -1).float()
    positions = torch.tensor([0, 49, 3])
    query, key = torch.randn(3, 4, dim), torch.randn(3, 2, dim)
    rotation = Rotation(positions, cache, interleaved)
    got_query, got_key = rotary_embedding(query, key, rotation)
    assert got_key is not None
    for x, got in ((query, got_query), (key, got_key)):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            number = torch.complex(x[..., first].double(), x[..., second].double())
            turned = number * torch.exp(1j * angles[positions, pair]).unsqueeze(1)
            torch.testing.assert_close(got[..., first].double(), turned.real, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(got[..., second].double(), turned.imag, atol=1e-5, rtol=1e-5)
        assert torch.equal(got[..., rot_dim:], x[..., rot_dim:])
    assert rotary_embedding(query, None, rotation)[1] is None


def test_gated_activations() -> None:
    x = torch.randn(6, 20)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    silu = gate / (1 + (-gate).exp()) * up
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    gelu = 0.5 * gate * (1 + torch.tanh(inner)) * up
    torch.testing.assert_close(silu_and_mul(x).double(), silu, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gelu_tanh_and_mul(x).double(), gelu, atol=1e-5, rtol=1e-5)
