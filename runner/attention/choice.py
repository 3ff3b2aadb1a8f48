"""Chooses the attention back end. Imports late: a missing package breaks only its own back end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from ..errors import RunnerError
from .base import AttentionBackend, AttentionLayer

_BACKENDS = {
    "reference": ("reference", "ReferenceBackend"),
    "triton": ("triton", "TritonBackend"),
    "flashinfer": ("flashinfer", "FlashInferBackend"),
    "flash_mla": ("flash_mla", "FlashMLABackend"),
}
# What "auto" tries, in order.
_PREFERRED = {"cuda": ("triton", "reference"), "cpu": ("reference",)}


class UnusableBackend(RunnerError):
    """The attention back end that the user asked for cannot run this model here."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"--attention-backend {name} cannot be used: {reason}")


def choose_backend(
    name: str, layers: Sequence[AttentionLayer], device: torch.device
) -> AttentionBackend:
    """The back end for `--attention-backend name`; raises `UnusableBackend` if it cannot run."""
    candidates = _PREFERRED[device.type] if name == "auto" else (name,)
    for candidate in candidates:
        backend, reason = _load(candidate, layers, device)
        if backend is not None:
            return backend
    raise UnusableBackend(name, reason)


def _load(
    name: str, layers: Sequence[AttentionLayer], device: torch.device
) -> tuple[AttentionBackend | None, str]:
    """The back end, or None and why not."""
    module_name, class_name = _BACKENDS[name]
    try:
        module = import_module(f".{module_name}", __package__)
    except ImportError as error:
        return None, str(error)
    backend: AttentionBackend = getattr(module, class_name)()
    reason = backend.check(layers, device)
    return (backend, "") if reason is None else (None, reason)
