"""The weights of one linear layer side by side, and its product with activations.

Quantised weights are multiplied as they are. Their activations are rounded to 15 bits with a scale
for each 32 of them; those of 16 and 32 bit weights stay fp32. A row's outputs don't depend on the
number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .bindings import MAX_PARTS, MatrixFields, PartFields, library
from .weight import QuantizedWeight


class Matrix:
    """Weights of equal width, whose outputs follow one another."""

    def __init__(self, parts: Sequence[QuantizedWeight], bias: Tensor | None = None) -> None:
        """bias: [rows] fp32, rows of all parts."""
        columns = parts[0].shape[1]
        assert len(parts) <= MAX_PARTS and all(part.shape[1] == columns for part in parts)
        self.parts, self.columns = tuple(parts), columns
        self.rows = sum(part.shape[0] for part in parts)
        self.bias = None if bias is None else bias.float().contiguous()
        assert self.bias is None or self.bias.shape == (self.rows,)
        self.fields = MatrixFields(columns, self.rows, len(parts), None)
        if self.bias is not None:
            self.fields.bias = self.bias.data_ptr()
        for index, part in enumerate(parts):
            self.fields.parts[index] = PartFields(
                part.type.code, part.shape[0], part.panels.data_ptr()
            )
        native = library()
        assert native is not None
        self._linear, self._address = native.slipstream_linear, ctypes.byref(self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its weights."""
        return sum(part.nbytes for part in self.parts)

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., columns] fp32 -> [..., rows] fp32, bias included."""
        assert x.shape[-1] == self.columns and x.dtype == torch.float32 and x.is_cpu
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.rows)
        self._linear(
            self._address,
            x.data_ptr(),
            x.numel() // self.columns,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
