"""Counts the bytes that a decode step must read: all weights once, those of experts only if a token
chooses them, and the KV of its contexts.

With the duration of a step, they give the share of the device's bandwidth that it reaches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..batch.kv_cache import KVCache
from ..messages import Ready
from ..models.formats.expert_stack import ExpertStack
from ..models.formats.packed import Packed
from ..models.layers import Embedding, Linear


class _Engine(Protocol):
    ready: Ready


EngineT = TypeVar("EngineT", bound=_Engine)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights that every step reads; tables from which it gathers rows do not count,
    nor do routed experts.

    Weights that torch packed for the CPU are not parameters and are not counted.
    """
    owners: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    gathered: set[int] = set()
    routed = {
        id(part)
        for module in model.modules()
        if hasattr(module, "expert_share")
        for part in module.modules()
    }
    for module in model.modules():
        if id(module) in routed:
            continue
        tensors = [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]
        for name, tensor in tensors:
            if "cos_sin" in name:
                continue
            owners[tensor.data_ptr()] += 1
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        if isinstance(module, Embedding):
            gathered |= {tensor.data_ptr() for tensor in module.buffers()}
    return sum(size for at, size in sizes.items() if at not in gathered or owners[at] > 1)


def expert_bytes(model: nn.Module) -> tuple[int, float]:
    """(bytes of all routed experts, the share of them that one token reads)."""
    sizes = [
        (sum(tensor.nbytes for tensor in module.buffers()), share)
        for module in model.modules()
        if isinstance(share := getattr(module, "expert_share", None), float)
    ]
    total = sum(size for size, _ in sizes)
    return total, sum(size * share for size, share in sizes) / total if total else 0.0


def weight_formats(model: nn.Module) -> str:
    """The formats of quantised matrices, in memory as the kernels of the device read them."""
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, Packed):
            found.add(module.weight.kind)
        elif isinstance(module, ExpertStack):
            found |= module.native_formats
        elif isinstance(module, Linear) and module.matrix is not None:
            found |= {part.type.name for part in module.matrix.parts if not part.type.is_float}
    return ", ".join(sorted(found))


def note_traffic(ready: Ready, model: Any, cache: KVCache, speculator: Any) -> None:
    """Add the formats of weights to `ready`, and on a GPU the bytes that a step reads.

    `speculator` is the drafter or None.
    """
    if isinstance(model, nn.Module):
        ready.weight_formats = weight_formats(model)
    if not ready.device.startswith("cuda"):
        return
    ready.weight_bytes = weight_bytes(model)
    ready.expert_bytes, ready.expert_share = expert_bytes(model)
    draft = getattr(speculator, "model", None)
    if isinstance(draft, nn.Module):
        ready.draft_weight_bytes = weight_bytes(draft)
    ready.kv_bytes_per_token = cache.num_bytes // (cache.num_blocks * cache.block_size)
    ready.device_name = torch.cuda.get_device_name()
