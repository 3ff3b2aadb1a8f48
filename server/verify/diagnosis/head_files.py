"""Reads a draft head's checkpoint as far as a diagnosis needs it: config, names, a few tensors.

It reads safetensors by itself, because the server's process has no torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_HEADER = 100 << 20  # safetensors' own limit
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
_SAMPLE_ROWS = 512  # rows of a large matrix that are read


@dataclass(frozen=True)
class _Tensor:
    path: Path
    start: int  # byte offset in the file
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeadFiles:
    """A head's config and tensors; names lack the prefixes of their formats."""

    config: dict[str, Any]
    tensors: dict[str, _Tensor] = field(default_factory=dict)

    def read(self, name: str, max_rows: int = _SAMPLE_ROWS) -> NDArray[Any] | None:
        """The first rows of a tensor; None if it is absent or has another number format."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.dtype not in (*_DTYPES, "BF16"):
            return None
        kind = np.dtype(_DTYPES.get(tensor.dtype, "<u2"))
        rows = min(max_rows, tensor.shape[0]) if tensor.shape else 1
        count = rows * int(np.prod(tensor.shape[1:], dtype=np.int64))
        found = np.fromfile(tensor.path, kind, count, offset=tensor.start)
        if tensor.dtype == "BF16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.reshape(rows, *tensor.shape[1:])

    def all_of(self, name: str) -> NDArray[Any] | None:
        """A whole tensor; None if it is absent."""
        return self.read(name, 1 << 40)


def read_head(folder: Path) -> HeadFiles | None:
    """The files of a head; None if the folder holds no config and safetensors."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, _Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= _header(path)
    except (OSError, ValueError, struct.error):
        return None
    return HeadFiles(config, tensors) if tensors and isinstance(config, dict) else None


def _header(path: Path) -> dict[str, _Tensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(file.read(length))
    return {
        name.removeprefix("model."): _Tensor(
            path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
