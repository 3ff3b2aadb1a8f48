"""The fixed forms of products, experts, norms and log probabilities, interpreted: the bits of a row
do not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.experts import ExpertWeights
from slipstream.kernels.linear.fixed import tiles_for
from slipstream.kernels.linear.linear_choice import GATE_UP, Shape
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.sampling.log_probs import likeliest, log_probs_reference

from .. import ordered_dot

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
PARTS = (slice(0, 1), slice(19, 20), slice(3, 20))


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered_dot.install(monkeypatch)


@pytest.mark.parametrize("role", ["other", "gate_up"])
def test_rows_of_products(role: str) -> None:
    from slipstream.kernels.linear.triton import skinny

    x, weight = torch.randn(20, 72).half(), torch.randn(80, 72).half()

    def compute(rows: torch.Tensor) -> torch.Tensor:
        choice = tiles_for(Shape(role, 80, 72), len(rows))
        if role == "gate_up":
            return skinny.multiply(rows, weight, choice, GATE_UP)
        return skinny.multiply(rows, weight, choice)

    whole = compute(x)
    if role == "other":
        torch.testing.assert_close(whole, x @ weight.T, rtol=2e-3, atol=2e-2)
    for part in PARTS:
        assert torch.equal(compute(x[part].clone()), whole[part])


def test_rows_of_experts() -> None:
    from slipstream.kernels.linear.triton.moe import run_experts_fixed

    experts = ExpertWeights(torch.randn(4, 32, 16) / 4, torch.randn(4, 16, 16) / 4)
    x = torch.randn(20, 16)
    weights, ids = torch.rand(20, 4).topk(2)
    whole = run_experts_fixed(x, experts, weights, ids)
    expected = run_experts_reference(x, experts, weights, ids)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for part in PARTS:
        got = run_experts_fixed(x[part], experts, weights[part], ids[part])
        assert torch.equal(got, whole[part])


def test_rows_of_the_projections_of_latent_attention() -> None:
    from slipstream.kernels.attention.triton.mla import project_heads

    x, weight = torch.randn(20, 2, 24), torch.randn(2, 24, 16)
    whole = project_heads(x, weight, fixed=True)
    torch.testing.assert_close(whole, torch.einsum("thk,hkn->thn", x, weight))
    for part in PARTS:
        assert torch.equal(project_heads(x[part], weight, fixed=True), whole[part])


@pytest.mark.parametrize("size", [16, 100, 700])
def test_rows_of_norms(size: int) -> None:
    from slipstream.kernels.linear.triton.norm_rope import rms_norm

    x, weight = torch.randn(20, size), torch.randn(size)
    whole = rms_norm(x, weight, 1e-5)
    for part in PARTS:
        assert torch.equal(rms_norm(x[part], weight, 1e-5), whole[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_probs_equal_the_reference_in_any_company(dtype: torch.dtype) -> None:
    from slipstream.kernels.sampling.triton.log_probs import log_probs

    logits = torch.randn(5, 5000).to(dtype)
    logits[1, :7] = float("-inf")
    whole = log_probs(logits[:, :4999])
    expected = log_probs_reference(logits[:, :4999])
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    for row in range(5):
        assert torch.equal(log_probs(logits[row : row + 1, :4999])[0], whole[row])


def test_the_likeliest_are_in_one_order() -> None:
    values = torch.tensor([[-1.0, 0.5, -3.0, 0.5, float("-inf"), -1.0, 2.0]])
    largest, columns = likeliest(values, 6)
    assert columns.tolist() == [[6, 1, 3, 0, 5, 2]]
    assert largest.tolist() == [[2.0, 0.5, 0.5, -1.0, -1.0, -3.0]]
    assert likeliest(values, 2)[1].tolist() == [[6, 1]]
