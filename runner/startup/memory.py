"""Measures the memory of the largest step, and decides how many blocks the KV cache gets."""

from __future__ import annotations

import gc
import logging
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...configs.schema import CacheConfig
from ..batch.kv_cache import KVCacheGroup, KVLayout, StepLoad, fitting_block_size, make_groups
from ..errors import RunnerError
from ..graphs.capture import GraphPool, paused_garbage_collector
from ..graphs.manager import CudaGraphManager
from ..step.target import Target
from ..step.token_graphs import TokenGraphs

logger = logging.getLogger(__name__)
CPU_CACHE_BYTES = 1 << 30


class NoKVMemory(RunnerError):
    def __init__(self, available: int, needed: int, share_counts: bool, states: int = 0) -> None:
        """`states`: bytes of the recurrent states."""
        raising = "--gpu-memory-utilization or --kv-cache-memory-bytes, or"
        if not share_counts:
            raising = "--kv-cache-memory-bytes or"
        left, need = (f"{max(0, size) / 2**20:.0f} MiB" for size in (available, needed))
        super().__init__(
            f"only {left} are left for the KV cache, but one request of max_model_len needs "
            f"{need}: raise {raising} lower --max-model-len"
            + (f", or --max-num-seqs ({states / 2**20:.0f} MiB of recurrent states)" * bool(states))
        )


def memory_allocated(device: torch.device) -> int:
    """Bytes that this process's tensors use on a GPU; on a CPU, the resident memory of the
    process."""
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
    memory: Counter[str],
) -> int:
    """Bytes for the KV cache: as configured, otherwise what the GPU has left, or on a CPU 1 GiB.

    On a GPU, this runs the largest step of `profile` once to measure the peak memory of
    activations, and captures some of its graphs to estimate the memory of all. Both are added to
    `memory`.
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
    memory["peak activation"] += activations
    memory["graphs, reserved"] += graphs
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free  # weights, the CUDA context, and other processes on this GPU
    return int(total * config.gpu_memory_utilization) - others - activations - graphs


def num_kv_blocks(
    config: CacheConfig,
    device: torch.device,
    memory_bytes: int,
    layout: KVLayout,
    max_model_len: int,
    max_tokens: int,
    states: int = 0,  # bytes of recurrent states, for the error
) -> int:
    """Blocks per group, including the null block; at most what `max_tokens` tokens can use.

    Raises `NoKVMemory` if one request of `max_model_len` does not fit.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    blocks, needed = layout.blocks_in(memory_bytes), layout.blocks_for(max_model_len)
    if blocks < needed:
        share_counts = device.type == "cuda" and config.kv_cache_memory_bytes is None
        raise NoKVMemory(memory_bytes, layout.bytes_of(needed), share_counts, states * share_counts)
    return min(blocks, max(needed, layout.blocks_for(max_tokens)))


def log_fp8_memory(
    config: CacheConfig, memory_bytes: int, layout: KVLayout, num_blocks: int
) -> None:
    """Log what an fp8 cache of `num_blocks` blocks saves beside one in the model's dtype."""
    if all(group.dtype is None for group in layout.groups):
        return
    layers = [replace(layer, fp8=None) for group in layout.groups for layer in group.layers]
    wide = KVLayout(make_groups(layers), layout.block_size, layout.dtype)
    own, other = (one.block_bytes / one.block_size for one in (layout, wide))
    size, name = layout.block_size, str(layout.dtype).removeprefix("torch.")
    tokens = (num_blocks - 1) * size
    if config.num_gpu_blocks_override is not None:
        memory_bytes = num_blocks * layout.block_bytes
    in_wide = max(0, min(wide.blocks_in(memory_bytes), num_blocks) - 1) * size
    logger.info(
        "KV cache in fp8_e4m3: %.0f bytes per token instead of %.0f in %s; %d tokens fit instead "
        "of %d",
        own, other, name, tokens, in_wide,
    )  # fmt: skip


def refuse_early(
    config: CacheConfig,
    device: torch.device,
    groups: Sequence[KVCacheGroup],
    dtype: torch.dtype,
    max_model_len: int,
    load: StepLoad,
) -> None:
    """Raise `NoKVMemory` before weights are loaded, if the size of the cache is known by then.

    `groups` are the target's only; a drafter's leave less memory. The check is repeated later,
    because the attention back end, which is chosen later, may need larger blocks than
    `--block-size`.
    """
    if config.kv_cache_memory_bytes is not None or device.type != "cuda":
        known = config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        layout = KVLayout(groups, fitting_block_size(config.block_size, groups), dtype, load)
        num_kv_blocks(config, device, known, layout, max_model_len, max_model_len)


@dataclass(frozen=True)
class MemoryProfile:
    """The parts of a step, to be run with a minimal KV cache."""

    small_target: Callable[[], Target]
    max_num_tokens: int
    max_logits_rows: int
    pool: GraphPool | None  # None without graphs
    graphs: CudaGraphManager | None  # the target's
    token_graphs_of: Callable[[Target], TokenGraphs | None]
    draft_graph_bytes: Callable[[Target], int]

    def run_largest_step(self) -> None:
        """Run the step that uses the most memory."""
        logits = self.small_target().warm_up(self.max_num_tokens)
        rows = self.max_logits_rows
        logits[:1].float().expand(rows, -1).softmax(-1).cumsum(-1)  # the sampler's copies

    def graph_bytes(self) -> int:
        """Estimate the bytes that all graphs will use. Keeps no graph."""
        if self.graphs is None or self.pool is None:
            return 0
        with self.pool.throw_away(), paused_garbage_collector(collect=False):
            target = self.small_target()
            total = self.graphs.profile_memory(target.create_forward_fn)
            if (token_graphs := self.token_graphs_of(target)) is not None:
                total += token_graphs.profile_memory()
            return total + self.draft_graph_bytes(target)
