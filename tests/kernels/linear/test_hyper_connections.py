"""Hyper-connections: Triton's form, interpreted, equals the reference."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.hyper.connections import (
    add_to_streams_reference,
    mix_streams,
    mix_streams_reference,
)
from slipstream.kernels.linear.hyper.site import Site

from ...cases import some


def make_site(count: int, size: int, iterations: int = 20) -> Site:
    rows = count * (2 + count)
    fn, base, scale = torch.randn(rows, count * size) / 8, torch.randn(rows), torch.rand(3)
    return Site(fn, base, scale, 1e-6, 1e-6, iterations)


def test_the_mix_of_streams_is_doubly_stochastic() -> None:
    _, post, comb = mix_streams_reference(torch.randn(5, 4, 24), make_site(4, 24))
    for dim in (1, 2):
        torch.testing.assert_close(comb.sum(dim), torch.ones(5, 4), rtol=1e-3, atol=1e-3)
    assert bool((post > 0).all()) and bool((post < 2).all())


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "count", "size"), some([(1, 4, 40), (17, 4, 96), (3, 2, 33)], [(1, 4, 40)])
)
def test_kernels_equal_the_reference(rows: int, count: int, size: int, dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.hyper.triton import connections as kernels

    streams, site = torch.randn(rows, count, size).to(dtype), make_site(count, size)
    got, expected = kernels.mix_streams(streams, site), mix_streams_reference(streams, site)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    output = torch.randn(rows, size + 3).to(dtype)[:, :size]
    args = (streams, output, expected[1], expected[2])
    summed = add_to_streams_reference(*args)
    torch.testing.assert_close(
        kernels.add_to_streams(*args), summed, rtol=tolerance, atol=tolerance
    )
    parts, more = torch.randn(3, rows, size), torch.randn(rows, size).to(dtype)
    whole = (parts[0] + parts[1] + parts[2] + more.float()).to(dtype)
    summed = add_to_streams_reference(streams, whole, *args[2:])
    for add in (kernels.add_to_streams, add_to_streams_reference):
        got_sum = add(streams, parts, *args[2:], more)
        torch.testing.assert_close(got_sum, summed, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.usefixtures("triton_interpreter")
def test_three_streams_have_no_kernel() -> None:
    streams, site = torch.randn(2, 3, 8), make_site(3, 8)
    got, expected = mix_streams(streams, site), mix_streams_reference(streams, site)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
