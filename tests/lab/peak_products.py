"""Prints the speed of torch's matrix products on this GPU: a large one, and Llama 8B's by rows.

`PYTHONPATH=.src python tests/lab/peak_products.py` prints microseconds, TFLOP/s and TB/s of
weights, measured in a CUDA graph over six weights of each shape, which exceed the cache. It also
prints the clock and the power during each run: for many rows the GPU's power limit, and not the
shape of the product, limits the speed.
"""

from __future__ import annotations

import subprocess
from functools import partial

import torch
from linear_tune import time_in_graph

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (64, 128, 192, 256, 384, 512, 768, 1024)
WEIGHTS = 6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 50


def main() -> None:
    """Measure and print."""
    side = 8192
    a, b = random(side, side), random(side, side)
    spent = time_in_graph([lambda: a @ b])
    print(f"{side} cubed: {spent:.0f} us, {2 * side**3 / spent / 1e6:.0f} TFLOP/s")
    for name, (outputs, inputs) in SHAPES.items():
        weights, found = [random(outputs, inputs) for _ in range(WEIGHTS)], []
        for rows in ROWS:
            x = random(rows, inputs)
            spent = time_in_graph([partial(torch.mm, x, weight.t()) for weight in weights])
            rate = 2 * rows * outputs * inputs / spent / 1e6
            read = 2 * outputs * inputs / spent / 1e6
            found.append(f"{rows}: {spent:.1f} us {rate:.0f} TFLOP/s {read:.2f} TB/s")
        print(f"{name} {outputs}x{inputs}: " + ", ".join(found), flush=True)
    query = "clocks.sm,power.draw,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    print(subprocess.run(command, capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    main()
