"""Chooses between a Triton kernel and its plain-torch reference, by device.

A start can be gone through without a card (see `compile_ahead`): tensors of torch's meta device,
which have shapes and no memory, then stand for tensors on the card that `pretend_card` names.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Card:
    """What kernels, and the choice among them, depend on."""

    name: str
    capability: tuple[int, int]
    num_processors: int


_pretended: Card | None = None


def pretend_card(card: Card | None) -> None:
    """From now on, meta tensors stand for tensors on `card`; None = for nothing."""
    global _pretended
    _pretended = card


def is_card(device: torch.device) -> bool:
    """Whether `device` is a CUDA card, or stands for one."""
    return device.type == "cuda" or (device.type == "meta" and _pretended is not None)


def card_of(device: torch.device) -> Card | None:
    """The card that `device` is, or stands for; None for a CPU."""
    if device.type == "meta":
        return _pretended
    return _card(device) if device.type == "cuda" else None


@cache
def _card(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Card(properties.name, capability, properties.multi_processor_count)


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _triton_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # triton, too, looks only once


def use_triton(tensor: Tensor) -> bool:
    """True if the Triton implementation should work on `tensor`.

    That is so for CUDA tensors where triton is installed. CPU tensors need Triton's interpreter
    (`TRITON_INTERPRET=1`) and the wish to use it (`SLIPSTREAM_TRITON=1`): it is exact but slow.
    """
    if tensor.is_cuda or (_pretended is not None and tensor.is_meta):
        return _triton_installed()
    if not _triton_interpreted():
        return False
    return _triton_installed() and os.environ.get("SLIPSTREAM_TRITON") == "1"
