"""Disassembles compiled kernels, all of them in one run of NVIDIA's disassembler.

It takes 0.2 s to start, which is longer than the instructions of most kernels take.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = 16  # bytes


def code_of(cubin: bytes) -> bytes:
    """The machine code of all functions in an ELF file of 64 bits, in the order of its sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    sections = []  # (place of the name, offset, bytes)
    for at in range(table, table + count * size, size):
        name, *_, offset, length = struct.unpack_from("<IIQQQQ", cubin, at)
        sections.append((name, offset, length))
    names = sections[names_at][1]
    found = [
        cubin[offset : offset + length]
        for name, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    ]
    assert found, "a cubin without functions"
    return b"".join(found)


def assemblies(cubins: Sequence[bytes]) -> Iterator[str]:
    """Yield each compiled kernel's instructions for sm_90a, a line each."""
    codes = [code_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        # `cuobjdump -sass` runs this program too, with an analysis that takes half of its time
        command = [str(TOOLS / "nvdisasm"), "--no-dataflow", "--binary", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = iter([line for line in text.splitlines() if line.lstrip().startswith("/*")])
    for code in codes:
        yield "\n".join(next(lines) for _ in range(len(code) // INSTRUCTION))
    assert next(lines, None) is None
