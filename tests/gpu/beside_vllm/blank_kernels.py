"""Leaves kernels for other GPUs than Hopper out of CUDA libraries: blank_kernels.py FILE ...

A library holds each kernel for many GPUs, and the driver takes the one for its own. The others are
most of the library. Zeros take their place, which take no space once compressed, so that nothing
else in the library moves.
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
    head: int
    start: int
    size: int


@dataclass(frozen=True)
class FatBinary:
    """Where a fat binary begins and ends, and its entries."""

    start: int
    end: int
    entries: list[Entry]


def fat_binaries(data: bytes) -> Iterator[FatBinary]:
    """The fat binaries of a library."""
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
            entries.append(Entry(kind, arch, place, start, length))
            place = start + length
        if entries:
            yield FatBinary(at, end, entries)
        at = end


def is_needed(entry: Entry, beside: list[Entry]) -> bool:
    """Whether a Hopper GPU may run an entry, given all of its fat binary."""
    if entry.kind == _CUBIN:
        return entry.arch == HOPPER
    return entry.arch <= HOPPER and not any(
        other.kind == _CUBIN and other.arch == HOPPER for other in beside
    )


def blanked(data: bytes) -> bytes:
    """The library with only what a Hopper GPU runs, and zeros in place of the rest.

    Each fat binary becomes one with fewer entries at the same place. One without any for Hopper
    keeps its entries without their contents: the driver refuses it as before."""
    found = bytearray(data)
    for binary in fat_binaries(data):
        kept = [entry for entry in binary.entries if is_needed(entry, binary.entries)]
        if not kept:
            for entry in binary.entries:
                found[entry.start : entry.start + entry.size] = bytes(entry.size)
            continue
        body = b"".join(data[entry.head : entry.start + entry.size] for entry in kept)
        first = binary.start + _HEAD
        found[first : binary.end] = body.ljust(binary.end - first, b"\0")
        struct.pack_into("<Q", found, binary.start + 8, len(body))
    return bytes(found)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_bytes(blanked(Path(name).read_bytes()))
