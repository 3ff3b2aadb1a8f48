"""Compiles the native library once per machine and keeps it in the user's cache folder.

Run as `python -m slipstream.kernels.cpu.build` to compile ahead, as `make setup` does, or with
`--all` to compile for every processor into this package, as an image does. Without a compiler, or
on a processor without AVX2, there is no library, and torch computes everything.
SLIPSTREAM_CPU_KERNELS=off does the same on any machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
_PACKAGED = Path(__file__).parent / "compiled"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w")
# processor flags that Linux reports -> compiler flags, the fastest first
INSTRUCTION_SETS = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"},
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
    ),
    "avx2": ({"avx2", "fma", "f16c"}, ("-mavx2", "-mfma", "-mf16c")),
}
_TIMEOUT = 300  # seconds of compiling; it takes about six


def instruction_set(processor_flags: set[str]) -> str | None:
    """The best of those that a processor with these flags can run, None without any."""
    for name, (needed, _) in INSTRUCTION_SETS.items():
        if needed <= processor_flags:
            return name
    return None


def processor_flags() -> set[str]:
    """The processor's features as Linux names them; empty elsewhere."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def find_compiler() -> str | None:
    """The path of a C++ compiler, the one that the environment names first."""
    names = [os.environ.get("CXX") or "", "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def library_path(name: str | None = None) -> Path | None:
    """The compiled library, compiled now if it is not in the cache; None if it cannot be had.

    `name` is an instruction set, by default the best one of this processor.
    """
    name = name or instruction_set(processor_flags())
    if name is None or os.environ.get("SLIPSTREAM_CPU_KERNELS") == "off":
        return None
    try:
        packaged, path = (folder / _file_name(name) for folder in (_PACKAGED, _cache_folder()))
        if packaged.exists():
            return packaged
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            compile_library(path, name)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next((line for line in str(output).splitlines() if "error" in line), output)
        logger.warning("no native CPU kernels, torch computes instead: %s", str(reason).strip())
        return None


def compile_library(path: Path, name: str) -> None:
    """Compile for the instruction set `name`; OSError or SubprocessError if that fails."""
    compiler = find_compiler()
    if compiler is None:
        raise OSError("there is no C++ compiler (install g++ for a faster CPU path)")
    logger.info("compiling CPU kernels for %s, once ...", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        command = [compiler, *_FLAGS, *INSTRUCTION_SETS[name][1], "-o", str(out)]
        source = str(_SOURCES / "slipstream_cpu.cpp")
        subprocess.run(
            [*command, source], check=True, capture_output=True, text=True, timeout=_TIMEOUT
        )
        os.replace(out, path)  # whole or not at all, whoever else compiles it now


def _file_name(name: str) -> str:
    return f"cpu-{name}-{_source_hash()}.so"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slipstream" / "native"


def _source_hash() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "--all" in sys.argv[1:]:
        for each in INSTRUCTION_SETS:
            compile_library(_PACKAGED / _file_name(each), each)
    else:
        print(library_path() or "no native CPU kernels on this machine")
