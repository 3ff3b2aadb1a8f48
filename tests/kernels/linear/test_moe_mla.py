"""Expert choice, experts and latent projections equal their definitions, token by token."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.attention.mla import absorb_query, expand_value
from slipstream.kernels.linear.experts import ACTIVATIONS, ExpertWeights, Routing
from slipstream.kernels.linear.moe import run_experts, select_experts


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_select_experts(scoring: str, group_score: str, with_bias: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 12)
    bias = torch.randn(12) * 0.3 if with_bias else None
    routing = Routing(3, scoring, 4, 2, group_score, renormalise=True, scale=2.5)
    weights, ids = select_experts(logits, routing, bias)
    for row in range(50):
        scores = logits[row].sigmoid() if scoring == "sigmoid" else logits[row].softmax(-1)
        choice = (scores if bias is None else scores + bias).tolist()
        groups = [sorted(choice[i : i + 3], reverse=True) for i in range(0, 12, 3)]
        group_scores = [g[0] + (g[1] if group_score == "top2" else 0) for g in groups]
        best = sorted(range(4), key=lambda g: -group_scores[g])[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        expected = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert ids[row].tolist() == expected
        chosen = scores[expected]
        torch.testing.assert_close(weights[row], chosen / chosen.sum() * 2.5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_run_experts(activation: str, tokens: int) -> None:
    """Those of "clamped_swiglu" have biases."""
    torch.manual_seed(1)
    x, weights = torch.randn(tokens, 16), torch.rand(tokens, 2)
    gate_up, down = torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    first = last = None
    if activation == "clamped_swiglu":
        first, last = torch.randn(5, 24) * 4, torch.randn(5, 16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])  # expert 4 gets no token
    got = run_experts(x, ExpertWeights(gate_up, down, first, last, activation), weights, ids)
    for token in range(tokens):
        total = torch.zeros(16)
        for weight, expert in zip(weights[token], ids[token], strict=True):
            both = gate_up[expert] @ x[token] + (0 if first is None else first[expert])
            gate, up = both.chunk(2)
            if activation == "silu":
                gate = gate * gate.sigmoid()
            elif activation == "limited_silu":
                gate = torch.where(gate > 7, 7.0, gate)
                up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up))
                gate = gate / (1 + (-gate).exp())
            elif activation == "clamped_swiglu":
                gate = torch.where(gate > 7, 7.0, gate)
                up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up)) + 1
                gate = gate / (1 + (-1.702 * gate).exp())
            else:
                gate = torch.nn.functional.gelu(gate, approximate="tanh")
            out = down[expert] @ (gate * up) + (0 if last is None else last[expert])
            total += weight * out
        torch.testing.assert_close(got[token], total, atol=1e-4, rtol=1e-4)


def test_absorbed_products_equal_expanded_ones() -> None:
    torch.manual_seed(2)
    query, latent = torch.randn(7, 3, 8), torch.randn(7, 3, 10)
    w_uk, w_uv = torch.randn(3, 8, 10), torch.randn(3, 6, 10)
    cached = torch.randn(5, 10)
    keys = torch.einsum("sl,hnl->shn", cached, w_uk)
    expected = torch.einsum("thn,shn->ths", query, keys)
    got = torch.einsum("thl,sl->ths", absorb_query(query, w_uk), cached)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    values = torch.einsum("thl,hvl->thv", latent, w_uv)
    torch.testing.assert_close(expand_value(latent, w_uv), values, atol=1e-4, rtol=1e-4)
