"""An fp8 KV cache and the attention back ends: scales, refusals, and calls of fake packages."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.device import Card
from slipstream.kernels.quant.e4m3 import E4M3
from slipstream.runner.attention import choice, triton
from slipstream.runner.attention.base import AttentionLayer
from slipstream.runner.attention.choice import UnusableBackend, first_usable
from slipstream.runner.attention.flash_mla import FlashMLABackend
from slipstream.runner.attention.flashinfer import FlashInferBuilder
from slipstream.runner.attention.fp8_layers import (
    UnusableKVFormat,
    by_layer_id,
    with_fp8_cache,
)
from slipstream.runner.attention.triton import TritonBackend

from ...speculators.tiny_engine import TinyEngine, prompts, save_llama
from .test_attention_backends import CPU, FAKE_FLASHINFER, GQA, MLA, batch_of, full, tensors_of

FP8 = Fp8Cache(torch.float32, 0.5, 0.125)


def test_layers_get_the_scales_of_the_cache_that_they_read() -> None:
    reader = replace(GQA, layer_id=2, kv_source=0)
    drafter = replace(GQA, layer_id=7)
    layers = with_fp8_cache(
        [GQA, replace(GQA, layer_id=1), reader, drafter, replace(MLA, layer_id=3)],
        torch.bfloat16,
        {0: (0.5, 0.25), 1: (2.0, 3.0), 3: (4.0, 5.0)},
    )
    assert [(la.fp8.k_scale, la.fp8.v_scale) for la in layers if la.fp8] == [
        *((0.5, 0.25), (2.0, 3.0), (0.5, 0.25)),
        *((1.0, 1.0), (1.0, 1.0)),  # the drafter's own cache, and packed rows
    ]
    assert [la.cache_row(la.head_dim) for la in layers] == [64, 64, 64, 64, 656]
    odd = replace(MLA, head_dim=530, head_dim_v=514)
    with pytest.raises(UnusableKVFormat, match=r"multiple of 4 values, not 514: use .* auto"):
        with_fp8_cache([odd], torch.bfloat16, {})


def test_scales_of_decoder_layers_find_the_attention_layers_among_them() -> None:
    """As in hybrids, of which every fourth layer attends to a cache."""

    def block(layer: AttentionLayer | None) -> nn.Module:
        one = nn.Module()
        one.self_attn = nn.Module()
        if layer is not None:
            one.self_attn.layer = layer
        return one

    model = nn.Module()
    layers = [None, GQA, None, replace(GQA, layer_id=1)]
    model.layers = nn.ModuleList(block(layer) for layer in layers)
    scales = {1: (0.5, 0.25), 3: (2.0, 3.0), 4: (4.0, 4.0)}
    assert by_layer_id(model, scales) == {0: (0.5, 0.25), 1: (2.0, 3.0)}


def test_flash_mla_names_the_back_end_that_reads_fp8_rows() -> None:
    layer = replace(MLA, fp8=Fp8Cache(torch.bfloat16, latent=512))
    with pytest.raises(UnusableBackend, match="packed fp8 rows .*; use --attention-backend triton"):
        first_usable("flash_mla", [layer], CPU)


@pytest.mark.parametrize("layer", [GQA, MLA])
def test_auto_on_a_gpu_is_triton_or_nothing(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "is_card", lambda device: True)
    monkeypatch.setattr(FlashMLABackend, "check", lambda self, layers, device: None)
    monkeypatch.setattr(triton, "card_of", lambda device: Card("A100", (8, 0), 108))
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: True)
    (fp8,) = with_fp8_cache([layer], torch.bfloat16, {})
    words = r"compute capability 8\.9 or later .*A100 has 8\.0; use --kv-cache-dtype auto"
    with pytest.raises(UnusableBackend, match=words):
        first_usable("auto", [fp8], CPU)
    assert TritonBackend.check([layer], CPU) is None
    monkeypatch.setattr(triton, "card_of", lambda device: Card("L4", (8, 9), 58))
    assert choice.choose_backend("auto", [fp8], CPU).name == "triton"


def test_a_refused_back_end_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runner.startup.load_target.load_weights", None)
    cache, graph = {"kv_cache_dtype": "fp8_e4m3"}, {"attention_backend": "flashinfer"}
    with pytest.raises(UnusableBackend, match="--attention-backend flashinfer cannot be used"):
        TinyEngine(save_llama(tmp_path, layers=1), SpeculativeConfig(), cache=cache, graph=graph)


def scaled(kind: Any) -> Any:
    """A fake wrapper that takes the scales of an e4m3 cache as FlashInfer does."""

    class Scaled(kind):  # type: ignore[misc]
        def run(
            self,
            query: Tensor,
            caches: tuple[Tensor, Tensor],
            out: Tensor,
            k_scale: float,
            v_scale: float,
        ) -> Tensor:
            assert self.settings["kv_data_type"] == caches[0].dtype == E4M3
            assert self.settings["q_data_type"] == query.dtype == torch.float32
            wide = (caches[0].float() * k_scale, caches[1].float() * v_scale)
            return super().run(query, wide, out)

    return Scaled


@pytest.mark.parametrize("length", [1, 3])
def test_flashinfer_gets_the_scales_of_each_layer(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = replace(GQA, fp8=FP8)
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        monkeypatch.setattr(FAKE_FLASHINFER, name, scaled(getattr(FAKE_FLASHINFER, name)))
    workspace = torch.zeros(8, dtype=torch.uint8)
    builder = FlashInferBuilder(FAKE_FLASHINFER, layer, 16, 4, 256, torch.float32, workspace)
    common = batch_of([length] * 3, [20, 40, 3])
    query, key, value, cache = tensors_of(layer, common)
    cache = cache.to(E4M3)
    desc = full(3, length)
    builder.build_for_capture(common, desc)
    for fp8 in (FP8, Fp8Cache(torch.float32, 2.0, 4.0)):  # layers of a group differ in scales
        own, ours = replace(layer, fp8=fp8), cache.clone()
        got = builder.build(common, desc).attend(own, query, key, value, ours)
        plain = triton.TritonMetadata(common, length)  # the references, on the CPU
        expected = plain.attend(own, query, key, value, theirs := cache.clone())
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_native_layers_step_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from slipstream.kernels.cpu import weight

    if not weight.available():
        pytest.skip("no native CPU kernels on this machine")
    folder = save_llama(tmp_path, layers=2, heads=2)
    with caplog.at_level(logging.INFO):
        engine = TinyEngine(
            folder, SpeculativeConfig(), dtype="auto", cache={"kv_cache_dtype": "fp8"}
        )
        run = engine.run(prompts(2), max_tokens=4)
        engine.close()
    assert caplog.text.count("torch runs layer 0 and all others: its KV cache is fp8") == 1
    assert [len(tokens) for tokens in run.tokens.values()] == [4, 4]
