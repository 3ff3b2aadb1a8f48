"""Chooses between a Triton kernel and its plain-torch reference, by device."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from torch import Tensor


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
    if tensor.is_cuda:
        return _triton_installed()
    if not _triton_interpreted():
        return False
    return _triton_installed() and os.environ.get("SLIPSTREAM_TRITON") == "1"
