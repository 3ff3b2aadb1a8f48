"""Chooses the attention back end. Imports it late: a missing package disables only its back end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module

import torch

from ...kernels.device import is_card
from ..errors import RunnerError
from .base import AttentionBackend, AttentionLayer

logger = logging.getLogger(__name__)

_BACKENDS = {
    "reference": ("reference", "ReferenceBackend"),
    "triton": ("triton", "TritonBackend"),
    "flashinfer": ("flashinfer", "FlashInferBackend"),
    "flash_mla": ("flash_mla", "FlashMLABackend"),
}


class UnusableBackend(RunnerError):
    """The attention back end that the user chose cannot run this model on this machine."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"--attention-backend {name} cannot be used: {reason}")


def choose_backend(
    name: str,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Create the back end for `--attention-backend name`, or raise `UnusableBackend`.

    "auto" takes the first preferred back end that can run. A log line says which one and why.
    """
    backend, why, refused = first_usable(name, layers, device, batch_invariant)
    backend.batch_invariant = batch_invariant
    without = f" (not {'; not '.join(refused)})" if refused else ""
    logger.info("attention back end: %s, %s%s", backend.name, why, without)
    return backend


def first_usable(
    name: str, layers: Sequence[AttentionLayer], device: torch.device, batch_invariant: bool = False
) -> tuple[AttentionBackend, str, list[str]]:
    """The back end, the reason for choosing it, and what others refused. Raises
    `UnusableBackend`."""
    candidates = _preferred(layers, device) if name == "auto" else [(name, "as configured")]
    if batch_invariant and is_card(device):
        if name not in ("auto", "triton"):
            raise UnusableBackend(
                name, "--batch-invariant needs the back end triton, whose splits can be fixed"
            )
        candidates = [("triton", "whose splits do not depend on the batch")]
    refused: list[str] = []
    for candidate, why in candidates:
        backend, reason = _load(candidate, layers, device)
        if backend is not None:
            return backend, why, refused
        refused.append(f"{candidate}: {reason}")
    raise UnusableBackend(name, reason if len(refused) == 1 else "; ".join(refused))


def _preferred(layers: Sequence[AttentionLayer], device: torch.device) -> list[tuple[str, str]]:
    """The back ends that "auto" tries in order, each with the reason for choosing it.

    FlashInfer is left out: it needs exact lengths on the host, so every step waits for the GPU.
    """
    reference = ("reference", "plain torch, which runs anywhere")
    if not is_card(device):
        return [("reference", "plain torch, for devices without CUDA")]
    triton = ("triton", "which supports graphs for any batch of this model")
    if any(layer.reads_lists for layer in layers):
        flash = ("flash_mla", "with kernels for listed latent rows on SM90")
        return [flash, triton, reference]
    if any(layer.fp8 is not None and layer.fp8.paged for layer in layers):
        flash = ("flash_mla", "with kernels for listed fp8 rows on SM90")
        return [flash, ("triton", "whose kernels read an fp8 KV cache")]
    if any(layer.fp8 is not None for layer in layers):
        # not the reference, whose steps would be many times as long as those of a 16-bit cache
        return [("triton", "whose kernels read an fp8 KV cache")]
    if any(layer.is_compressed for layer in layers):
        return [("triton", "whose kernels read compressed caches"), reference]
    if all(layer.is_mla for layer in layers):
        return [("flash_mla", "with kernels for latent attention on SM90"), triton, reference]
    return [triton, reference]


def _load(
    name: str, layers: Sequence[AttentionLayer], device: torch.device
) -> tuple[AttentionBackend | None, str]:
    """Import and check a back end: returns it, or None and the reason."""
    module_name, class_name = _BACKENDS[name]
    try:
        module = import_module(f".{module_name}", __package__)
    except ImportError as error:
        return None, str(error)
    backend: AttentionBackend = getattr(module, class_name)()
    reason = backend.check(layers, device)
    return (backend, "") if reason is None else (None, reason)
