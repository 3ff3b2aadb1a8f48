"""Prints the bytes per second that a kernel can read on this GPU.

`PYTHONPATH=.src python tests/lab/peak_bandwidth.py` measures the ceiling that `slipstream bench
offline` takes as --peak-bandwidth. It sums 8 GB of random bf16 and prints the best of several
shapes.
"""

from __future__ import annotations

import torch
from linear_tune import time_in_graph

BYTES = 8 << 30


def main() -> None:
    """Measure and print."""
    data = torch.empty(BYTES // 2, device="cuda", dtype=torch.bfloat16).normal_()
    found = {}
    for columns in (4096, 16384, 65536):
        view = data.view(-1, columns)
        for name, call in (("amax", lambda v=view: v.amax(1)), ("sum", lambda v=view: v.sum(1))):
            found[name, columns] = BYTES / (time_in_graph([call]) * 1e-6)
    best = max(found, key=lambda key: found[key])
    print(torch.cuda.get_device_name(), f"{found[best]:.4g} bytes/s", *best)


if __name__ == "__main__":
    main()
