"""Reads the header of a GGUF file in a fraction of a second, without the tensors' data."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_SIZES = {kind: struct.calcsize("<" + form) for kind, form in _SCALARS.items()}
_LONG_ARRAY = 1024  # items; longer arrays are vocabularies
_MAX_ALIGNMENT = 1 << 20
_ALIGNMENT = 32  # bytes, of the tensors' data, unless the header sets another
# Tensor type -> numbers per block, bytes per block. For other types only the start is checked.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),  # F32, F16, BF16
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),  # Q4_0 ... Q8_0
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),  # Q2_K ... Q6_K
}  # fmt: skip


class GGUFError(Exception):
    """The file is not a valid GGUF file, or cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a readable GGUF file: {reason}.")


class _Reader:
    """A cursor over the memory-mapped file, which each method moves on.

    A file that is broken raises one of the errors that `_opened` turns into GGUFError.
    """

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
            raise ValueError("a string extends beyond the end of the file")
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int, long_arrays: bool = True) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.unpack("IQ")
            if count > _LONG_ARRAY and not long_arrays:
                return self.skip(item, count)
            if item in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[item]}"))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.unpack(_SCALARS[kind])[0]

    def skip(self, kind: int, count: int) -> None:
        """Skip an array of `count` items; returns None, which stands for its value."""
        if kind in _SIZES:
            self.position += count * _SIZES[kind]
        elif kind == _STRING:
            data, position, unpack = self.data, self.position, struct.Struct("<Q").unpack_from
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
            self.position = position
        else:
            raise ValueError(f"it has an array of the unsupported value type {kind}")

    def pairs(self, long_arrays: bool) -> tuple[int, dict[str, Any]]:
        """Read the header from its start: the number of tensors, and its keys with their values.

        Without `long_arrays` the value of a long array is None. Leaves the cursor at the tensor
        list. Raises ValueError or struct.error if the header is invalid or ends early.
        """
        magic, version, tensors, count = self.unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(
                f"it starts with {magic!r} and version {version}, not b'GGUF' and version 2 or 3"
            )
        found = {}
        for _ in range(count):
            key = self.string()
            found[key] = self.value(self.unpack("I")[0], long_arrays)
        return tensors, found

    def tensor_end(self) -> int:
        """Read the next entry of the tensor list; returns the end of its data.

        The end is an offset in bytes from the start of all tensors' data."""
        self.string()
        (num_dims,) = self.unpack("I")
        if num_dims > 8:
            raise ValueError(f"a tensor has {num_dims} dimensions, more than 8")
        size, (kind, offset) = math.prod(self.unpack(f"{num_dims}Q")), self.unpack("IQ")
        numbers, length = _BLOCKS.get(kind, (0, 0))
        return int(offset + (size // numbers * length if numbers else 1))


@contextmanager
def _opened(path: Path) -> Iterator[_Reader]:
    """Map a file for reading; errors of the reader inside the block become GGUFError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(data)
    except struct.error as error:
        raise GGUFError(path, "it ends in the middle of its header") from error
    except OSError as error:
        raise GGUFError(path, error.strerror or "an input error") from error
    except ValueError as error:
        raise GGUFError(path, str(error)) from error
    except (ArithmeticError, TypeError, MemoryError, RecursionError) as error:
        raise GGUFError(path, "its header is invalid") from error


def read_gguf_metadata(path: Path, long_arrays: bool = True) -> dict[str, Any]:
    """All keys of the header with their Python values. Raises GGUFError.

    Without `long_arrays`, the value of a long array, such as a vocabulary, is None, which is
    faster.
    """
    with _opened(path) as reader:
        return reader.pairs(long_arrays)[1]


def check_gguf_tensors(path: Path) -> int:
    """The number of tensors. Raises GGUFError if the file is too short for their data."""
    with _opened(path) as reader:
        count, metadata = reader.pairs(long_arrays=False)
        end = max((reader.tensor_end() for _ in range(count)), default=0)
        alignment = metadata.get("general.alignment") or _ALIGNMENT
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"its alignment {alignment!r:.40} is invalid")
        expected = -(-reader.position // alignment) * alignment + end
        if len(reader.data) < expected:
            raise ValueError(f"it has {len(reader.data)} bytes, but its header requires {expected}")
        return count
