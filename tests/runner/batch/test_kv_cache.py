"""KV groups, bytes and tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.runner.attention.base import AttentionLayer
from slipstream.runner.batch.kv_cache import KVCache, KVLayout, make_groups

CPU = torch.device("cpu")
FULL = AttentionLayer(0, 8, 2, 64, scale=1.0)
WINDOW = AttentionLayer(1, 8, 4, 32, scale=1.0, sliding_window=128)
SHARED = AttentionLayer(2, 16, 2, 64, scale=1.0, kv_source=0)
MLA = AttentionLayer(3, 16, 1, 576, scale=1.0, head_dim_v=512, is_mla=True)
DRAFT = AttentionLayer(4, 4, 2, 64, scale=1.0)


def test_layers_of_one_shape_and_window_share_a_group() -> None:
    groups = make_groups([FULL, WINDOW, SHARED, MLA, DRAFT])
    ids = [[layer.layer_id for layer in group.layers] for group in groups]
    assert ids == [[0, 4, 2], [1], [3]]
    assert [group.index for group in groups] == [0, 1, 2]
    assert [layer.layer_id for layer in groups[0].owners] == [0, 4]
    assert groups[1].sliding_window == 128 and groups[2].is_mla


def test_bytes_count_caches_not_readers() -> None:
    groups = make_groups([FULL, WINDOW, SHARED, MLA, DRAFT])
    full, window, mla = 2 * 16 * 2 * 64 * 2, 2 * 16 * 4 * 32, 16 * 576
    layout = KVLayout(groups, 16, torch.float16)
    assert layout.block_bytes == 2 * (full + window + mla)
    assert layout.blocks_in(10 * layout.block_bytes + 5) == 10
    assert [layout.blocks_for(tokens) for tokens in (16, 17)] == [2, 3]


def test_tensors_have_the_documented_shapes_and_readers_see_their_source() -> None:
    cache = KVCache(make_groups([FULL, WINDOW, SHARED, MLA]), 7, 16, torch.float32, CPU)
    assert cache.kv_caches[0].shape == (2, 7, 16, 2, 64)
    assert cache.kv_caches[1].shape == (2, 7, 16, 4, 32)
    assert cache.kv_caches[3].shape == (7, 16, 1, 576)
    assert cache.kv_caches[2] is cache.kv_caches[0]
    assert cache.group_of_layer == {0: 0, 1: 1, 2: 0, 3: 2}
    total = sum(tensor.nbytes for tensor in {id(t): t for t in cache.kv_caches.values()}.values())
    assert total == 7 * KVLayout(cache.groups, 16, torch.float32).block_bytes


def test_groups_of_fp8_layers_have_one_byte_a_value_and_latent_rows_are_packed() -> None:
    fp8 = Fp8Cache(torch.bfloat16)
    mla = replace(MLA, fp8=replace(fp8, latent=512))
    groups = make_groups([replace(FULL, fp8=fp8), WINDOW, replace(SHARED, fp8=fp8), mla, DRAFT])
    assert [[layer.layer_id for layer in group.layers] for group in groups] == [
        [0, 2],
        [1],
        [3],
        [4],
    ]
    full, window, draft = (2 * 16 * size for size in (2 * 64, 4 * 32 * 2, 2 * 64 * 2))
    assert KVLayout(groups, 16, torch.bfloat16).block_bytes == full + window + 16 * 656 + draft
    cache = KVCache(groups, 7, 16, torch.bfloat16, CPU)
    assert cache.kv_caches[0].dtype == cache.kv_caches[3].dtype == torch.float8_e4m3fn
    assert cache.kv_caches[1].dtype == cache.kv_caches[4].dtype == torch.bfloat16
    assert cache.kv_caches[3].shape == (7, 16, 1, 656)
    assert cache.kv_caches[2] is cache.kv_caches[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_begin_as_zeros_of_the_dtype(dtype: torch.dtype) -> None:
    cache = KVCache(make_groups([FULL, MLA]), 7, 16, dtype, CPU)
    for tensor in cache.kv_caches.values():
        assert tensor.dtype == dtype and tensor.is_contiguous() and not tensor.any()
        tensor.fill_(1)  # writable
