"""Chooses between a Triton kernel and its plain-torch reference, by device.

A start can also be replayed without a GPU (see `compile_ahead`): inside `meta_tensors_on(card)`,
tensors of torch's meta device, which have shapes but no memory, are treated as tensors on that GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# Triton, too, reads this once, when it is imported.
_TRITON_INTERPRETED = _TRITON_INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that kernels, and the choice between them, depend on."""

    name: str
    capability: tuple[int, int]
    num_processors: int
    memory_bytes: int = 0  # no kernel depends on it


_meta_card: ContextVar[Card | None] = ContextVar("meta_card", default=None)
_device_caches: list[_lru_cache_wrapper[Any]] = []


def cache_by_device(function: Callable[[torch.device], T]) -> Callable[[torch.device], T]:
    """Cache a function of a device; `meta_tensors_on` clears the cache when it begins and ends."""
    _device_caches.append(cached := cache(function))
    return cached


@contextmanager
def meta_tensors_on(card: Card) -> Iterator[None]:
    """Inside, in this thread, meta tensors are treated as tensors on `card`."""
    token = _meta_card.set(card)
    _forget_devices()
    try:
        yield
    finally:
        _meta_card.reset(token)
        _forget_devices()


def _forget_devices() -> None:
    for cached in _device_caches:
        cached.cache_clear()


def is_card(device: torch.device) -> bool:
    """True if tensors on `device` are on a GPU, or are treated so."""
    return card_of(device) is not None


@cache_by_device
def card_of(device: torch.device) -> Card | None:
    """The GPU of tensors on `device`; None for a CPU."""
    if device.type == "meta":
        return _meta_card.get()
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Card(
        properties.name, capability, properties.multi_processor_count, properties.total_memory
    )


@cache_by_device
def num_processors(device: torch.device) -> int:
    """The number of multiprocessors of the GPU; 4 for a CPU, so that splits are tested there."""
    card = card_of(device)
    return 4 if card is None else card.num_processors


def use_triton(tensor: Tensor) -> bool:
    """True if the Triton implementation should work on `tensor`.

    On a GPU this is so where triton is installed. On the CPU it needs Triton's interpreter
    (`TRITON_INTERPRET=1`) and `SLIPSTREAM_TRITON=1`, since the interpreter is exact but slow.
    """
    if tensor.is_cpu:
        return _TRITON_INTERPRETED and os.environ.get("SLIPSTREAM_TRITON") == "1"
    return _TRITON_INSTALLED and (tensor.is_cuda or is_card(tensor.device))
