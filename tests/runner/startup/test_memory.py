"""The memory that the KV cache uses, and the advice if it is too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.configs.schema import CacheConfig, Config, ModelConfig, SchedulerConfig
from slipstream.runner.attention.base import AttentionBackend, AttentionLayer
from slipstream.runner.attention.flash_mla import FlashMLABackend
from slipstream.runner.attention.flashinfer import FlashInferBackend
from slipstream.runner.attention.reference import ReferenceBackend
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.batch.kv_cache import KVLayout, make_groups
from slipstream.runner.startup import assembly as startup
from slipstream.runner.startup.memory import NoKVMemory, num_kv_blocks


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
    groups = make_groups([AttentionLayer(0, 2, 2, 16, scale=0.25)])
    config = CacheConfig(kv_cache_memory_bytes=given)
    with pytest.raises(NoKVMemory) as caught:
        layout = KVLayout(groups, 16, torch.float32)
        num_kv_blocks(config, torch.device(device), 1, layout, 64, 64)
    assert str(caught.value).endswith(f": {advice}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 512 bytes of KV per token."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("wanted", [8, 16, 128])
@pytest.mark.parametrize(
    "backend", [ReferenceBackend, TritonBackend, FlashInferBackend, FlashMLABackend]
)
def test_the_cache_stays_within_its_budget_whatever_blocks_the_back_end_needs(
    model: Path, backend: type[AttentionBackend], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SameBlocks(ReferenceBackend):
        """Runs on the CPU, in blocks of the back end's size."""

        @classmethod
        def block_size(cls, wanted: int) -> int:
            return backend.block_size(wanted)

    monkeypatch.setattr(startup, "choose_backend", lambda *args: SameBlocks())
    budget = 300 * 512  # of 1,024 tokens that the requests could use
    config = Config(
        model=ModelConfig(model=str(model), dtype="float32", device="cpu"),
        cache=CacheConfig(block_size=wanted, kv_cache_memory_bytes=budget),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    parts = startup.assemble(config, lambda _: None)
    parts.queue.shutdown()
    cache: Any = parts.target.cache
    size = cache.block_size
    taken = sum(tensor.nbytes for tensor in cache.kv_caches.values())
    assert size == parts.facts.kv_groups[0].block_size == parts.buffers.block_sizes[0]
    assert size == backend.block_size(wanted)
    assert budget - 512 * size < taken == cache.num_bytes <= budget
