"""Fills CUDA kernels for other GPUs than Hopper with zeros in libraries: blank_kernels.py FILE ...

A library holds each kernel for many GPUs, and the driver takes the one for its own. The others are
most of the library, and zeros take no space once compressed. Sizes and headers stay as they are.
PTX, which the driver compiles, is kept where no kernel for Hopper is beside it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC, _HEAD = b"\x50\xed\x55\xba", 16  # of a fat binary
_PTX, _CUBIN, HOPPER = 1, 2, 90


@dataclass(frozen=True)
class Entry:
    """One kernel image: PTX or machine code for an architecture, and where its bytes are."""

    kind: int
    arch: int
    start: int
    size: int


def fat_binaries(data: bytes) -> Iterator[list[Entry]]:
    """The entries of each fat binary in a library."""
    at = 0
    while 0 <= (at := data.find(_MAGIC, at)) <= len(data) - _HEAD:
        version, head, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + _HEAD + size
        if (version, head) != (1, _HEAD) or end > len(data):
            at += len(_MAGIC)
            continue
        place, entries = at + _HEAD, []
        while place < end:
            kind, _, entry_head, length = struct.unpack_from("<HHIQ", data, place)
            (arch,) = struct.unpack_from("<I", data, place + 28)
            start = place + entry_head
            assert kind in (_PTX, _CUBIN) and start + length <= end, f"unknown entry at {place:#x}"
            entries.append(Entry(kind, arch, start, length))
            place = start + length
        yield entries
        at = end


def is_needed(entry: Entry, beside: list[Entry]) -> bool:
    """Whether a Hopper GPU may run an entry, given all of its fat binary."""
    if entry.kind == _CUBIN:
        return entry.arch == HOPPER
    return entry.arch <= HOPPER and not any(
        other.kind == _CUBIN and other.arch == HOPPER for other in beside
    )


def blanked(data: bytes) -> bytes:
    """The library with zeros in place of what a Hopper GPU does not run."""
    found = bytearray(data)
    for entries in fat_binaries(data):
        for entry in entries:
            if not is_needed(entry, entries):
                found[entry.start : entry.start + entry.size] = bytes(entry.size)
    return bytes(found)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_bytes(blanked(Path(name).read_bytes()))
