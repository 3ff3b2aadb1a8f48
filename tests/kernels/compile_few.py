"""Compiles two kinds of a small kernel, from three launches; run by `test_compile_ahead.py`.

With `forks` it then runs three jobs of which two fail.
"""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from triton.runtime import driver

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_driver
from slipstream.kernels.compile_log import watch_compilations
from slipstream.kernels.device import Card, pretend_card


def outcomes() -> list[str]:
    """What became of a job that exits, of one that is fine, and of one that raises."""
    executor = ForkingExecutor(2)
    jobs = [executor.submit(sys.exit, 3), executor.submit(int), executor.submit(int, "x")]
    executor.shutdown()
    assert executor._running == {}
    return [type(job.exception()).__name__ for job in jobs] + [str(jobs[1].result())]


if __name__ == "__main__":
    log = watch_compilations()
    card = Card("NVIDIA H100 80GB HBM3", (9, 0), 132)
    pretend_card(card)
    driver.set_active(without_driver(card))
    norm = importlib.import_module("slipstream.kernels.triton.norm_rope")
    executor: Executor = ForkingExecutor(2) if sys.argv[1] == "forks" else ThreadPoolExecutor(2)
    with compiling_only(executor) as kernels:
        for rows, size in ((64, 128), (19, 128), (64, 256)):
            x = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")
            norm.rms_norm(x, x[0], 1e-5)
    failed = sum(kernel.future.exception() is not None for kernel in kernels.values())
    # What a fork found out is its own; its result says whether it had to compile.
    compiled = len(log.compiled) or sum(
        kernel.future.result() is True for kernel in kernels.values()
    )
    found = {"kinds": len(kernels), "failed": failed, "compiled": compiled}
    print(json.dumps(found | ({"jobs": outcomes()} if sys.argv[1] == "forks" else {})))
