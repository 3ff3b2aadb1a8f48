"""How much memory the KV cache gets, and how many blocks that is."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from pathlib import Path

import torch

from ...configs.schema import CacheConfig
from ..batch.kv_cache import KVCacheGroup, KVLayout
from ..errors import RunnerError
from ..graphs.manager import MemoryByPurpose
from .memory_profile import MemoryProfile

CPU_CACHE_BYTES = 1 << 30


class NoKVMemory(RunnerError):
    """The KV cache would hold less than one request."""

    def __init__(self, available: int, needed: int, share_counts: bool) -> None:
        raising = "--gpu-memory-utilization or --kv-cache-memory-bytes, or"
        if not share_counts:
            raising = "--kv-cache-memory-bytes or"
        super().__init__(
            f"{max(0, available) / 2**20:.0f} MiB are left for the KV cache, but one request of "
            f"max_model_len needs {needed / 2**20:.0f} MiB: raise {raising} lower --max-model-len"
        )


def memory_allocated(device: torch.device) -> int:
    """Bytes that tensors of this process hold: on the device, or (CPU) of the whole process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # no Linux
        return 0
    return pages * resource.getpagesize()


def kv_cache_bytes(
    config: CacheConfig,
    device: torch.device,
    profile: MemoryProfile,
    memory: MemoryByPurpose,
) -> int:
    """Bytes for the KV cache: as configured, else what the device has left, else 1 GiB (CPU).

    On a GPU the largest step of `profile` runs once, to see how much memory activations take at
    their peak, and its graphs show what captures will take. Both are noted in `memory`.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile.run_largest_step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    graphs = profile.graph_bytes()
    memory.add("peak activation", activations)
    memory.add("graphs, reserved", graphs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free  # weights, context, and whoever else uses this device
    return int(total * config.gpu_memory_utilization) - others - activations - graphs


def num_kv_blocks(
    config: CacheConfig,
    device: torch.device,
    memory_bytes: int,
    layout: KVLayout,
    max_model_len: int,
    max_tokens: int,
) -> int:
    """Blocks per group, the null block included; never more than `max_tokens` tokens can use.

    Raises `NoKVMemory` if one request of `max_model_len` does not fit.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    blocks, needed = layout.blocks_in(memory_bytes), layout.blocks_for(max_model_len)
    if blocks < needed:
        share_counts = device.type == "cuda" and config.kv_cache_memory_bytes is None
        raise NoKVMemory(memory_bytes, needed * layout.block_bytes, share_counts)
    return min(blocks, max(needed, layout.blocks_for(max_tokens)))


def refuse_early(
    config: CacheConfig,
    device: torch.device,
    groups: Sequence[KVCacheGroup],
    dtype: torch.dtype,
    max_model_len: int,
) -> None:
    """Raise `NoKVMemory` before weights are loaded, where the cache's size is known by then.

    `groups` are the target's alone; with a drafter's it only becomes less. The attention back end,
    which is chosen later, may need larger blocks than `--block-size`: then the cache is checked
    again.
    """
    if config.kv_cache_memory_bytes is not None or device.type != "cuda":
        known = config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        layout = KVLayout(groups, config.block_size, dtype)
        num_kv_blocks(config, device, known, layout, max_model_len, max_model_len)
