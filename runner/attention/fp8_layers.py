"""Makes attention layers whose KV cache is e4m3, and says what `--kv-cache-dtype fp8` needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from ...kernels.attention.paged_rows import Fp8Cache
from ..errors import RunnerError
from .base import AttentionLayer

KVScales = Mapping[int, tuple[float, float]]  # layer -> (scale of keys, scale of values)
_NUMBER = re.compile(r"(?:\w+\.)*?layers\.(\d+)\.")


class UnusableKVFormat(RunnerError):
    """The model's layers cannot have the KV cache that `--kv-cache-dtype` names."""


def is_fp8(kv_cache_dtype: str) -> bool:
    """Whether this value of `--kv-cache-dtype` means a cache of e4m3."""
    return kv_cache_dtype != "auto"


def by_layer_id(model: nn.Module, scales: KVScales) -> dict[int, tuple[float, float]]:
    """Scales by layer_id, from scales by the number of a decoder layer.

    The two numbers differ in models of which only some layers attend to a cache.
    """
    found = {}
    for path, module in model.named_modules():
        layer, match = getattr(module, "layer", None), _NUMBER.match(path)
        if isinstance(layer, AttentionLayer) and match is not None:
            number = int(match.group(1))
            if number in scales:
                found[layer.layer_id] = scales[number]
    return found


def with_fp8_cache(
    layers: Iterable[AttentionLayer], dtype: torch.dtype, scales: KVScales
) -> list[AttentionLayer]:
    """The same layers with a cache of e4m3; `dtype` is that of queries, keys and values.

    `scales` are by layer_id. A layer that reads another's cache gets that layer's scales; layers
    without scales get 1. The rows of MLA have scales of their own. DeepSeek V4's raw rows and
    entries become e4m3, its other caches stay as they are.
    """
    layers = list(layers)
    by_id = {layer.layer_id: layer for layer in layers}

    def converted(layer: AttentionLayer) -> AttentionLayer:
        source = layer
        while source.kv_source is not None:
            source = by_id[source.kv_source]
        if layer.rotary_tail is not None:  # DeepSeek V4's raw rows and entries
            latent, rotary = layer.head_dim - layer.rotary_tail, layer.rotary_tail
            return replace(layer, fp8=Fp8Cache(dtype, latent=latent, rotary=rotary, paged=True))
        if layer.entry_tokens > 1 or (layer.sliding_window is not None and not layer.attends):
            return layer  # V4's keys and pending rows, from which entries are computed
        if layer.is_mla:
            return replace(layer, fp8=Fp8Cache(dtype, latent=_latent_size(layer)))
        return replace(layer, fp8=Fp8Cache(dtype, *scales.get(source.layer_id, (1.0, 1.0))))

    return [converted(layer) for layer in layers]


def _latent_size(layer: AttentionLayer) -> int:
    """The values of a row of MLA that become e4m3."""
    latent = layer.head_dim_v or 0
    if latent % 4:  # the scales after them are float32
        raise UnusableKVFormat(
            f"--kv-cache-dtype fp8 needs latent rows of a multiple of 4 values, not {latent}: "
            "use --kv-cache-dtype auto"
        )
    return latent
