"""Runs the steps' work in order: at once on CUDA, whose stream is the queue, else on one thread.

On the CPU the worker thread plays the stream, so that the host schedules while a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


class DeviceQueue:
    """An ordered queue of jobs for one device, without gradients."""

    def __init__(self, device: torch.device) -> None:
        self._executor: ThreadPoolExecutor | None = None
        if device.type != "cuda":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="runner")

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones. A job must handle its own errors."""
        if self._executor is None:
            with torch.inference_mode():
                job()
        else:
            self._executor.submit(_run, job)

    def call(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones and wait for it; raises what it raises."""
        if self._executor is None:
            with torch.inference_mode():
                job()
        else:
            self._executor.submit(_run, job).result()

    def shutdown(self) -> None:
        """Let queued jobs finish and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _run(job: Callable[[], None]) -> None:
    with torch.inference_mode():  # it is per thread
        job()
