"""Triton's MLA projections, interpreted, equal their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import mla

from ..counted_kernel import CountedKernel

pytestmark = pytest.mark.usefixtures("triton_interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no bf16 product


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "heads", "nope", "latent", "value"),
    [(1, 2, 128, 512, 128), (5, 3, 24, 40, 20), (70, 2, 16, 32, 16)],
)
def test_projections_equal_their_references(
    rows: int, heads: int, nope: int, latent: int, value: int, dtype: torch.dtype
) -> None:
    from slipstream.kernels.attention.triton.mla import project_heads

    # views as in a model, where the rope part follows each head's query
    query = torch.randn(rows, heads, nope + 8).to(dtype)[..., :nope]
    w_uk = (torch.randn(heads, nope, latent) / nope**0.5).to(dtype)
    w_uv = (torch.randn(heads, value, latent) / latent**0.5).to(dtype)
    attended = torch.randn(rows, heads, latent).to(dtype)
    for got, expected in (
        (project_heads(query, w_uk), mla.project_heads_reference(query.float(), w_uk.float())),
        (
            project_heads(attended, w_uv.transpose(1, 2)),
            mla.project_heads_reference(attended.float(), w_uv.float().mT),
        ),
    ):
        assert got.dtype == dtype and got.is_contiguous() and got.shape == expected.shape
        error = (got.float() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


def test_the_public_functions_take_triton_for_few_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.attention.triton import mla as kernels

    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    counted = CountedKernel(kernels._project_heads_kernel)
    monkeypatch.setattr(kernels, "_project_heads_kernel", counted)
    w_uk, w_uv = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    for rows, launches in ((3, 2), (257, 2)):
        query, latent = torch.randn(rows, 2, 16), torch.randn(rows, 2, 32)
        torch.testing.assert_close(
            mla.absorb_query(query, w_uk), mla.project_heads_reference(query, w_uk),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
        torch.testing.assert_close(
            mla.expand_value(latent, w_uv), mla.project_heads_reference(latent, w_uv.mT),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
        assert counted.launches == launches
