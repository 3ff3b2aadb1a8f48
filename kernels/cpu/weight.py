"""A weight matrix in memory as the native kernels read it: its file's own bits in another order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .bindings import library
from .formats import WEIGHT_TYPES, StoredRows, WeightType

_LANES = 16  # rows of a panel
_TYPE_OF_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def available() -> bool:
    """Whether this machine has the native library; compiles it if need be."""
    return library() is not None


def stored_rows(tensor: Tensor) -> StoredRows:
    """A float matrix [rows, columns] on the CPU as stored rows; shares its memory if it can."""
    tensor = tensor.detach().contiguous()
    data = tensor.view(torch.uint8).numpy()
    return StoredRows(WEIGHT_TYPES[_TYPE_OF_DTYPE[tensor.dtype]], data, tensor.shape[1])


def pack_any(weight: Tensor | StoredRows) -> QuantizedWeight:
    """A weight in its own format; fp32 as fp16, unless that cannot hold it."""
    if isinstance(weight, StoredRows):
        return QuantizedWeight.pack(weight)
    if weight.dtype not in (torch.float16, torch.bfloat16):
        weight = weight.float()
        low, high = weight.aminmax()
        if max(-float(low), float(high)) <= torch.finfo(torch.float16).max:
            weight = weight.half()
    return QuantizedWeight.pack(stored_rows(weight))


class QuantizedWeight:
    """[rows, columns] numbers of one `WeightType`, packed in panels of 16 rows."""

    def __init__(self, type: WeightType, shape: tuple[int, int], panels: Tensor) -> None:
        self.type, self.shape, self.panels = type, shape, panels

    @classmethod
    def pack(cls, rows: StoredRows) -> QuantizedWeight:
        """The weight of a file's rows; its values stay those of the file, bit for bit."""
        native = library()
        assert native is not None, "there is no native library"
        num_rows, columns = rows.shape
        size = native.slipstream_panel_bytes(rows.type.code, columns) * -(-num_rows // _LANES)
        panels = torch.empty(size, dtype=torch.uint8)
        data = np.ascontiguousarray(rows.data)
        order = None
        if rows.order is not None:
            order = np.ascontiguousarray(rows.order, dtype=np.int64)
            assert order.shape == (num_rows,)
            assert 0 <= int(order.min()) and int(order.max()) < num_rows
        native.slipstream_pack(
            rows.type.code,
            data.ctypes.data,
            None if order is None else order.ctypes.data,
            num_rows,
            columns,
            panels.data_ptr(),
        )
        return cls(rows.type, rows.shape, panels)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.panels.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of any integer type -> [n, columns] fp32."""
        native = library()
        assert native is not None
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            raise IndexError(f"a row id is outside of the {self.shape[0]} rows")
        out = torch.empty(ids.numel(), self.shape[1])
        native.slipstream_rows(
            self.type.code,
            self.panels.data_ptr(),
            self.shape[1],
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
        )
        return out

    def dequantize(self) -> Tensor:
        """All values, [rows, columns] fp32."""
        return self.rows(torch.arange(self.shape[0]))
