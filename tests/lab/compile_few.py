"""Compiles a few kernels in forks, finds them again on disk, and runs jobs that fail.

Run by `test_compile_ahead.py` in a process of its own, with an empty cache.
"""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.compile_log import watch_compilations
from slipstream.kernels.device import Card


def outcomes() -> list[str]:
    """The outcomes of three jobs: one exits, one succeeds and one raises."""
    executor = ForkingExecutor(2)
    jobs = [executor.submit(sys.exit, 3), executor.submit(int), executor.submit(int, "x")]
    executor.shutdown()
    assert executor._running == {}
    return [type(job.exception()).__name__ for job in jobs] + [str(jobs[1].result())]


def compile_few(executor: Executor) -> dict[str, int]:
    """Compile the kernels of three launches; returns the numbers of kernels, failures and compiles.

    The launches need two kernels, because the number of rows is not specialised on.
    """
    log = watch_compilations()
    before = len(log.compiled)
    norm = importlib.import_module("slipstream.kernels.linear.triton.norm_rope")
    with compiling_only(executor) as kernels:
        for rows, size in ((64, 128), (19, 128), (64, 256)):
            x = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")
            norm.rms_norm(x, x[0], 1e-5)
    norm._rms_norm_kernel.device_caches.clear()  # so that kernels are found on disk
    failed = sum(kernel.future.exception() is not None for kernel in kernels.values())
    # A fork's log stays in the fork; its result says whether it had to compile.
    compiled = len(log.compiled) - before or sum(
        kernel.future.result() is True for kernel in kernels.values()
    )
    return {"kinds": len(kernels), "failed": failed, "compiled": compiled}


if __name__ == "__main__":
    card = Card("NVIDIA H100 80GB HBM3", (9, 0), 132)
    with without_gpu(card):
        forks = compile_few(ForkingExecutor(2))
        again = compile_few(ForkingExecutor(2))
        found = {"jobs": outcomes(), "forks": forks, "again": again}
        print(json.dumps(found | {"threads": compile_few(ThreadPoolExecutor(2))}))
