"""Dequantises GGUF's weight formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from ...kernels.cpu.formats import StoredRows
from ..errors import ModelLoadError

_PIECE = 8192  # quantised blocks converted at once


def values_of(rows: StoredRows) -> Tensor:
    """Dequantise a matrix to fp32."""
    kind = GGMLQuantizationType[rows.type.name]
    values = dequantised(rows.data, kind, rows.shape, "a matrix")
    return values if rows.order is None else values[torch.from_numpy(rows.order)]


def dequantised(
    data: np.ndarray[Any, Any], kind: GGMLQuantizationType, shape: tuple[int, ...], name: str
) -> Tensor:
    """Dequantise the tensor `name` to fp32; `data` as the gguf package reads it."""
    if kind in _FAST:
        blocks, per_block = _FAST[kind]
        out = torch.empty(shape)
        rows = data.reshape(-1, GGML_QUANT_SIZES[kind][1])
        into = out.view(-1, per_block)
        # in pieces, so that intermediate results stay in the CPU's cache
        for start in range(0, len(rows), _PIECE):
            piece = slice(start, start + _PIECE)
            # a copy, because torch does not accept read-only memory
            blocks(torch.from_numpy(rows[piece].copy()), into[piece])
        return out
    if data.dtype == np.uint8 and data.ndim == 2:
        # `dequantize` processes 16 rows at a time, which is slow if rows are short; as quantised
        # blocks are contiguous, rows can be joined
        joined = math.gcd(data.shape[0], 64)
        data = data.reshape(data.shape[0] // joined, -1)
    try:
        values = dequantize(data, kind)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"tensor {name} has an unsupported quantisation: {kind.name}."
        ) from error
    values = values if values.flags.writeable else values.copy()
    return torch.from_numpy(values).view(shape)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """[n, 20] bytes (fp16 scale, fp16 minimum, 32 nibbles: first the low ones) -> [n, 32] fp32."""
    scales = blocks[:, :4].contiguous().view(torch.float16).float()
    nibbles = blocks[:, 4:]
    out[:, :16] = nibbles & 15
    out[:, 16:] = nibbles >> 4
    out.mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """[n, 34] bytes (fp16 scale, 32 int8) -> [n, 32] fp32."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(blocks[:, :2].contiguous().view(torch.float16).float())


# The formats of the default model. The gguf package's NumPy code takes ten times as long.
_FAST: dict[GGMLQuantizationType, tuple[Callable[[Tensor, Tensor], None], int]] = {
    GGMLQuantizationType.Q4_1: (_q4_1, 32),
    GGMLQuantizationType.Q8_0: (_q8_0, 32),
}
