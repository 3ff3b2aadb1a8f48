"""The key-value header of a GGUF file, read in a fraction of a second; tensors stay untouched."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


class GGUFError(Exception):
    """The file is no readable GGUF."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a readable GGUF file: {reason}.")


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.position)
        self.position += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise ValueError("a string runs past the end of the file")
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.unpack("IQ")
            if item in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[item]}"))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.unpack(_SCALARS[kind])[0]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header with its Python value. Raises GGUFError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            magic, version, _, count = reader.unpack("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}")
            pairs = {}
            for _ in range(count):
                key = reader.string()
                pairs[key] = reader.value(reader.unpack("I")[0])
            return pairs
    except (OSError, ValueError, struct.error) as error:
        raise GGUFError(path, str(error)) from error
