"""Prints how many kernels each part of tests/lab/measure_chain.py launches, and its output.

`test_measure_chain.py` runs it in a process of its own, since Triton decides at import whether it
compiles or interprets. Nothing is compiled. Chains are short, since all layers launch the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from dry_launches import Counting

from slipstream.kernels.compile_ahead import compiling_only, without_gpu

sys.path.append(str(Path(__file__).parent))
import measure_chain  # noqa: E402


def main() -> None:
    measure_chain.ROLES = {(name, 1): by_rows for (name, _), by_rows in measure_chain.ROLES.items()}
    for name, part in measure_chain.PARTS.items():
        counting, bench = Counting(), measure_chain.Bench(torch.device("meta"))
        with torch.inference_mode(), without_gpu(measure_chain.H200), compiling_only(counting):
            part(bench)
        for kernel in counting.kernels:
            kernel.device_caches.clear()
        print(json.dumps({"part": name, "kinds": len(counting.kinds), "lines": bench.results}))


if __name__ == "__main__":
    main()
