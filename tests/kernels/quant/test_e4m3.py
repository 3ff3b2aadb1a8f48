"""Rounding to e4m3 equals an independent NumPy form, and latent rows have FlashMLA's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.quant.e4m3 import (
    E4M3,
    latent_row_bytes,
    pack_latent,
    quantise,
    unpack_latent,
)


def all_bf16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def numpy_e4m3(x: np.ndarray) -> np.ndarray:
    """The e4m3 bytes of float64 values: the nearest of all magnitudes, by search."""
    codes = np.arange(0x7F)
    exponents, mantissas = codes >> 3, codes & 7
    magnitudes = np.where(
        exponents == 0,
        mantissas * 2.0**-9,
        (8 + mantissas) * 2.0 ** (exponents.astype(np.float64) - 10),
    )
    size = np.minimum(np.abs(x), 448.0)
    above = np.searchsorted(magnitudes, np.where(np.isnan(size), 0, size)).clip(1, 0x7E)
    below = above - 1
    left, right = size - magnitudes[below], magnitudes[above] - size
    even = np.where(below % 2 == 0, below, above)
    best = np.where(left < right, below, np.where(left > right, above, even))
    best = np.where(np.isnan(x), 0x7F, best)
    return (best | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0371])
def test_all_bf16_values_round_as_in_numpy(scale: float) -> None:
    x = all_bf16()
    single = np.float32(scale)
    with np.errstate(all="ignore"):
        expected = numpy_e4m3((x.float().numpy() / single).astype(np.float64))
    assert (quantise(x, scale).view(torch.uint8).numpy() == expected).all()


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize("scale", [1.0, 0.0371])
def test_the_kernels_form_rounds_alike(scale: float) -> None:
    from slipstream.kernels.attention.triton.store_kv import store_kv

    x = all_bf16().view(64, 16, 64)
    cache = torch.zeros(2, 4, 16, 16, 64, dtype=E4M3)
    store_kv(x, x, cache, torch.arange(64), Fp8Cache(torch.bfloat16, scale, 2 * scale))
    keys, values = cache.view(torch.uint8).flatten(1, 2)
    assert (keys == quantise(x, scale).view(torch.uint8)).all()
    assert (values == quantise(x, 2 * scale).view(torch.uint8)).all()


def test_a_latent_row_is_values_then_scales_then_rotary_values() -> None:
    rows = torch.randn(5, 1, 576) * torch.logspace(-6, 3, 5)[:, None, None]
    rows[3, :, 128:256] = 0
    packed = pack_latent(rows, 512)
    assert packed.shape == (5, 1, latent_row_bytes(512, 64)) == (5, 1, 656)
    for row, stored in zip(rows[:, 0], packed[:, 0], strict=True):
        raw = stored.numpy().tobytes()
        scales = np.frombuffer(raw[512:528], np.float32)
        tiles = row[:512].view(4, 128)
        largest = tiles.abs().amax(1).numpy()
        np.testing.assert_array_equal(scales[largest > 0], largest[largest > 0] / np.float32(448))
        values = (tiles.numpy() / scales[:, None]).astype(np.float64)
        assert raw[:512] == numpy_e4m3(values).tobytes()
        rotary = torch.frombuffer(bytearray(raw[528:]), dtype=torch.bfloat16)
        assert torch.equal(rotary, row[512:].bfloat16())
    widened = unpack_latent(packed, 512, torch.float32)
    tiles = rows[..., :512].unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True)
    error = (widened - rows).abs()[..., :512].unflatten(-1, (4, 128))
    assert (error <= tiles / 16).all()  # half a step of the largest values of a tile


@pytest.mark.parametrize(("latent", "rotary"), [(32, 16), (200, 32)])
def test_other_sizes_have_a_partial_last_tile(latent: int, rotary: int) -> None:
    rows = torch.randn(7, latent + rotary)
    packed = pack_latent(rows, latent)
    assert packed.shape[1] == latent_row_bytes(latent, rotary)
    error = (unpack_latent(packed, latent, torch.float32) - rows).abs()
    assert error.max() < 0.3


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize(("latent", "rotary"), [(512, 64), (48, 16), (200, 32)])
def test_the_kernel_packs_latent_rows_alike(latent: int, rotary: int) -> None:
    from slipstream.kernels.attention.triton.store_kv import store_kv

    rows = torch.randn(6, 1, latent + rotary + 8)[..., 8:] * torch.logspace(-9, 3, 6)[:, None, None]
    rows[2, :, :latent] = 0
    rows[4, 0, 3] = float("nan")
    rows = rows.bfloat16().float()  # the interpreter cuts what it writes as bf16; a GPU rounds
    size = latent_row_bytes(latent, rotary)
    cache = torch.zeros(2, 4, 1, size, dtype=E4M3)
    slots = torch.tensor([5, -1, 0, 7, 2, 1])
    store_kv(rows, None, cache, slots, Fp8Cache(torch.float32, latent=latent))
    stored, packed = cache.view(torch.uint8).flatten(0, 1), pack_latent(rows, latent)
    got, expected = stored[slots[slots >= 0]], packed[slots >= 0]
    with_nan = 3
    got[with_nan, :, :128] &= 0x7F  # the sign of a NaN is nobody's concern
    expected[with_nan, :, :128] &= 0x7F
    assert (got[with_nan, :, : min(128, latent)] == 0x7F).all()
    got[with_nan, :, latent:size] = expected[with_nan, :, latent:size]
    assert torch.equal(got, expected)
    assert not stored[[3, 4, 6]].any()
