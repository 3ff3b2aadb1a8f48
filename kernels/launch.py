"""Launch features of this GPU and this Triton: dependent launch and the tensor memory accelerator.

With programmatic dependent launch (PDL) a kernel starts while the previous one is still running. It
may load what no kernel writes (weights), then waits before it touches anything else. Every program
of a kernel launched this way must wait, or a later kernel could overtake an earlier one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from .device import cache_by_device, card_of

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton
    gdc_launch_dependents = gdc_wait = None

_HOPPER = (9, 0)


def hash_functions(namespace: dict[str, Any]) -> None:
    """Make Triton hash all functions of a module; to be called at the end of a module whose kernels
    or functions are made of parts.

    Triton's hash of a kernel covers the constants of a function only if that function was hashed
    before. Without this call the hash would depend on which kernel is launched first, and a
    compiled kernel on disk would not be found again.
    """
    for value in list(namespace.values()):
        if isinstance(value, JITFunction):
            assert value.cache_key  # computed, and kept, when it is asked for


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the previous kernels have finished, then let the next one start.

    Letting it start before this kernel waits makes no step shorter (measured on an H200).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_early(pointers):
    """Prefetch the cache line at each pointer into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache_by_device
def _is_hopper(device: torch.device) -> bool:
    """True if the GPU has both features: Hopper introduced them."""
    card = card_of(device)
    return card is not None and card.capability >= _HOPPER


@cache
def pdl_wanted() -> bool:
    """Whether dependent launch is enabled: it is, unless SLIPSTREAM_PDL=0."""
    return os.environ.get("SLIPSTREAM_PDL") != "0"


def pdl_options(tensor: Tensor) -> dict[str, Any]:
    """Keyword arguments for launching a kernel that calls `wait_for_inputs(PDL)`."""
    if gdc_wait is not None and pdl_wanted() and _is_hopper(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def has_tma(tensor: Tensor) -> bool:
    """True if the GPU can load tiles through tensor descriptors."""
    return _is_hopper(tensor.device)


def fits_tma(*matrices: Tensor) -> bool:
    """True if a tensor descriptor can describe each matrix [rows, columns].

    Columns must be contiguous; the start and the distance between rows must be multiples of 16
    bytes.
    """
    return all(
        matrix.stride(1) == 1
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        for matrix in matrices
    )
