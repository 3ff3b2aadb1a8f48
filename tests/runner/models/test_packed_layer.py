"""A layer of quantised weights uses the kernels of its device."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.linear_choice import Skinny
from slipstream.kernels.quant.tiled import TiledWeight
from slipstream.runner.models.formats.packed import PackedLayer

from ...kernels.quant.random_weights import random_weight


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
def test_a_layer_tiles_its_weights_and_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    parts = [random_weight("int4 128", rows, 256, seed=rows) for rows in (40, 24)]
    layer = PackedLayer(parts, "qkv", torch_only=False)
    assert isinstance(layer.whole, TiledWeight) and layer.sizes == [64]
    x, norm = torch.randn(3, 256).half(), (torch.rand(256).half(), 1e-5)
    assert isinstance(layer.choice(x), Skinny)
    dense = torch.cat([part.dequantise() for part in parts])
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm[0].float()
    for got in (layer.forward(x, None, norm), layer.sums(x, None, norm).sum(0)):
        torch.testing.assert_close(got.float(), normed @ dense.T, rtol=1e-2, atol=1e-2)
    kept = PackedLayer(parts, "qkv", torch_only=True)
    assert not isinstance(kept.whole, TiledWeight) and kept.choice(x) is None
