"""What a start with too little memory for the KV cache advises."""

from __future__ import annotations

import pytest
import torch

from slipstream.configs.schema import CacheConfig
from slipstream.runner.attention.base import AttentionLayer
from slipstream.runner.kv_cache import make_groups
from slipstream.runner.memory import NoKVMemory, num_kv_blocks


@pytest.mark.parametrize(
    ("device", "given", "advice"),
    [
        ("cpu", 1, "raise --kv-cache-memory-bytes or lower --max-model-len"),
        ("cpu", None, "raise --kv-cache-memory-bytes or lower --max-model-len"),
        ("cuda", 1, "raise --kv-cache-memory-bytes or lower --max-model-len"),
        (
            "cuda",
            None,
            "raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower --max-model-len",
        ),
    ],
)
def test_only_flags_that_help_are_advised(device: str, given: int | None, advice: str) -> None:
    groups = make_groups([AttentionLayer(0, 2, 2, 16, 0.25)])
    config = CacheConfig(kv_cache_memory_bytes=given)
    with pytest.raises(NoKVMemory) as caught:
        num_kv_blocks(config, torch.device(device), 1, groups, torch.float32, 64, 64)
    assert str(caught.value).endswith(f": {advice}")
