"""Runs the steps' work in order: at once where a stream is the queue, on one thread on the CPU.

On the CPU the worker thread plays the stream, so that the host schedules while a step computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..errors import RunnerError

log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """The device for `--device`; "auto" is CUDA where there is one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunnerError("--device cuda was asked for, but torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


class DeviceQueue:
    """An ordered queue of jobs for one device, without gradients."""

    def __init__(self, device: torch.device) -> None:
        self._executor: ThreadPoolExecutor | None = None
        if device.type == "cpu":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="runner")
        elif device.type == "cuda":
            # The host's own tensors are small: threads that spin between operations on them would
            # only take cores from the server.
            torch.set_num_threads(1)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones. A job must handle its own errors."""
        if self._executor is None:
            with torch.inference_mode():
                job()
        else:
            self._executor.submit(_run_alone, job)

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


def _run_alone(job: Callable[[], None]) -> None:
    """Run a job whose result nobody takes."""
    try:
        _run(job)
    except BaseException:
        log.exception("a job of the device's queue did not handle its error")
        raise
