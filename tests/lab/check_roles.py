"""Checks that fp8 products by warps with roles end, from the smallest shapes on, and are right.

    PYTHONPATH=.src:tests/lab python tests/lab/check_roles.py

Each line is a case, printed before its kernel starts and after 20 launches of it have ended: tiles,
programs, steps of a tile, stages, and the relative error against the product of the same codes in
float32. A kernel that has not ended after three seconds is called so, and the script ends with 1.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import torch
from measure_packed import exact_result, random_packed

from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.packed.coded import code_rows, decode_rows
from slipstream.kernels.packed.coded_linear import coding_of
from slipstream.kernels.packed.kinds import GATE_UP, PARTS, PLAIN, Codes
from slipstream.kernels.packed.triton import hopper_codes
from slipstream.kernels.quant.tiled import tile

ROWS = Codes(64, 128, 3, 4, 1, 64, 0, 0, roles=1)
GROUPS = Codes(64, 128, 3, 4, 1, 64, 1, 1, roles=1)
WIDE = Codes(128, 128, 4, 4, 1, 128, 0, 0, roles=1)
PATIENCE = 3.0  # seconds
# rows, weight rows, columns, mode, kernel, programs; few kernels, since each takes a second
CASES: tuple[tuple[int, int, int, int, Codes, int | None], ...] = (
    (5, 64, 128, PLAIN, ROWS, 1),  # one tile of one step
    (5, 64, 1024, PLAIN, ROWS, 1),  # more steps than stages
    (5, 128, 128, PLAIN, ROWS, 1),  # a second tile, of one step
    (5, 128, 384, PLAIN, ROWS, 1),  # as many steps as stages
    (5, 128, 1024, PLAIN, ROWS, 1),
    (257, 640, 1024, PLAIN, ROWS, 7),
    (257, 640, 1352, PLAIN, GROUPS, None),
    (257, 640, 1352, PARTS, replace(GROUPS, split_k=3), None),  # more tiles than multiprocessors
    (257, 640, 1024, PLAIN, WIDE, None),
    (257, 640, 1024, PLAIN, WIDE, 2),
    (257, 640, 1024, PARTS, replace(WIDE, split_k=3), 4),
    (128, 28672, 4096, GATE_UP, WIDE, None),  # gates of Llama 8B
    (256, 28672, 4096, GATE_UP, WIDE, None),
    (256, 28672, 4096, GATE_UP, replace(WIDE, block_n=64), None),
    (5, 128, 1024, GATE_UP, replace(ROWS, joined=1), 1),
    (256, 28672, 4096, GATE_UP, replace(WIDE, joined=1), None),
)


def wait(device: torch.device) -> None:
    """Wait until the GPU has done all work, or end the process."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    began = time.monotonic()
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() - began > PATIENCE:
            print("  has not ended", flush=True)
            os._exit(1)
        time.sleep(1e-3)


def check(
    rows: int, outputs: int, columns: int, mode: int, choice: Codes, programs: int | None,
    device: torch.device,
) -> float:  # fmt: skip
    """The relative error of the last of 20 launches."""
    shape = Shape("gate_up" if mode == GATE_UP else "o", outputs, columns)
    packed = replace(random_packed("fp8", shape, device), activations="fp8-token")
    weight = tile(packed)
    coding = coding_of(weight, choice)
    coded = code_rows(torch.randn(rows, columns, device=device).bfloat16(), coding)
    exact = exact_result(shape, decode_rows(coded, coding), replace(packed, activations="16bit"))
    width = outputs // 2 if mode == GATE_UP else outputs
    blocks = -(-rows // choice.block_m) * -(-width // choice.block_n) * choice.split_k
    steps = math.ceil(columns / 128 / choice.split_k)
    fields = f"{blocks:4} tiles {programs or 'all'} programs {steps:3} steps {choice.stages} stages"
    print(f"{rows:4} x {outputs:5} x {columns:4} mode {mode} {fields}", end=" ", flush=True)
    for _ in range(20):
        out = hopper_codes.multiply(
            coded, weight, choice, torch.bfloat16, mode, programs=programs
        )  # fmt: skip
    if device.type == "cuda":
        wait(device)
    value = (out.sum(0) if out.dim() == 3 else out).float()
    return float((value - exact).norm() / exact.norm())


def main() -> None:
    device = torch.device("cuda", 0)
    wrong = 0
    for case in CASES:
        error = check(*case, device=device)
        wrong += not error < 0.01
        print(f"error {error:.1e}" + ("" if error < 0.01 else "  WRONG"), flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
