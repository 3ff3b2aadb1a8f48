"""Stream sums, row selection and paired norms: interpreted Triton equals plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import norm_rope, streams

pytestmark = pytest.mark.usefixtures("triton_interpreter")
HALF = torch.float16  # the interpreter rounds to bfloat16 differently


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks per row, the last one partly filled."""
    from slipstream.kernels.linear.triton import streams as kernels

    monkeypatch.setattr(kernels, "_BLOCK", 16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == HALF else torch.int32)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_stream_is_summed_into_its_columns(parts: int) -> None:
    from slipstream.kernels.linear.triton.streams import write_stream

    torch.manual_seed(parts)
    hidden = torch.randn(parts, 5, 40) if parts else torch.randn(5, 40).to(HALF)
    residual, out = torch.randn(5, 80).to(HALF)[:, 8:48], torch.full((5, 120), 7.0, dtype=HALF)
    write_stream(hidden, residual, out[:, 40:80])
    assert torch.equal(bits(out[:, 40:80]), bits(streams.write_stream_reference(hidden, residual)))
    assert (out[:, :40] == 7).all() and (out[:, 80:] == 7).all()
    assert torch.equal(bits(write_stream(hidden, residual, None)), bits(out[:, 40:80]))
    plain = torch.zeros(5, 120, dtype=HALF)
    assert streams.write_stream(hidden, residual, plain[:, 40:80]).dtype == HALF
    assert torch.equal(bits(plain[:, 40:80]), bits(out[:, 40:80])) and not plain[:, :40].any()
    if not parts:
        write_stream(hidden, None, out[:, :40])
        assert torch.equal(out[:, :40], hidden)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_two_norms_abreast(dtype: torch.dtype, kind: torch.dtype | None, normed: bool) -> None:
    from slipstream.kernels.linear.triton.norm_rope import rms_norm
    from slipstream.kernels.linear.triton.streams import norm_pair

    torch.manual_seed(2)
    left, right = torch.randn(9, 24).to(dtype), torch.randn(6, 48).to(dtype)[:, 3:27]
    ids = None if kind is None else torch.tensor([8, 0, 3, 3, 7, 1], dtype=kind)
    left = left[:6] if ids is None else left
    weights = (torch.randn(24).to(dtype), torch.randn(24).to(dtype)) if normed else None
    got = norm_pair(left, right, weights, 1e-5, ids)
    expected = streams.norm_pair_reference(left, right, weights, 1e-5, ids)
    tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if weights is not None:  # bit-identical to two single norms
        rows = left if ids is None else left[ids]
        halves = [rms_norm(x, w, 1e-5) for x, w in zip((rows, right), weights, strict=True)]
        assert torch.equal(bits(got), bits(torch.cat(halves, -1)))


@pytest.mark.parametrize("parts", [0, 2])
def test_a_norm_adds_chosen_rows_and_writes_where_it_is_told(parts: int) -> None:
    from slipstream.kernels.linear.triton.norm_rope import fused_add_rms_norm

    torch.manual_seed(4)
    x = torch.randn(parts, 3, 40) if parts else torch.randn(3, 40).to(HALF)
    wide, weight = torch.randn(6, 80).to(HALF), torch.rand(40).to(HALF)
    residual, rows = wide[:, 40:], torch.tensor([5, 0, 2])
    plain = fused_add_rms_norm(x, residual[rows].contiguous(), weight, 1e-5)
    out, wide_out = torch.empty(3, 40, dtype=HALF), torch.full((3, 99), 7.0, dtype=HALF)
    stream = wide_out[:, 50:90]
    got = fused_add_rms_norm(x, residual, weight, 1e-5, rows, out, stream)
    for at, place, expected in zip(got, (out, stream), plain, strict=True):
        assert at is place and torch.equal(bits(at), bits(expected))
    assert (wide_out[:, :50] == 7).all() and (wide_out[:, 90:] == 7).all()
    reference = norm_rope.fused_add_rms_norm_reference(x, residual[rows], weight, 1e-5)
    assert torch.equal(bits(stream), bits(reference[1]))


def test_a_plain_norm_writes_where_it_is_told() -> None:
    from slipstream.kernels.linear.triton import norm_rope as kernels

    for function in (norm_rope.rms_norm, kernels.rms_norm):
        x, weight, out = torch.randn(3, 40), torch.rand(40), torch.empty(3, 40)
        assert function(x, weight, 1e-5, out) is out
        assert torch.equal(out, function(x, weight, 1e-5))
