"""Runs the work of steps in order: on the CPU in a thread, on a GPU at once.

A GPU's stream is a queue already. On the CPU the thread takes its place, so that the host schedules
the next step while one computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..errors import RunnerError

log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """The device of `--device`; "auto" is CUDA if there is a GPU, else the CPU.

    Raises RunnerError for "cuda" without a GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunnerError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


class DeviceQueue:
    """An ordered queue of jobs for one device, without gradients."""

    def __init__(self, device: torch.device) -> None:
        self._executor: ThreadPoolExecutor | None = None
        if device.type == "cpu":
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="runner")
        elif device.type == "cuda":
            # The host's own tensors are small, and threads that spin between operations on them
            # would occupy cores that the server needs.
            torch.set_num_threads(1)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones. A job must handle its own errors."""
        if self._executor is None:
            with torch.inference_mode():
                job()
        else:
            self._executor.submit(_run_alone, job)

    def call(self, job: Callable[[], None]) -> None:
        """Run `job` after all earlier ones, wait for it and raise its exception."""
        if self._executor is None:
            with torch.inference_mode():
                job()
        else:
            self._executor.submit(_run, job).result()

    def shutdown(self) -> None:
        """Wait for queued jobs and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _run(job: Callable[[], None]) -> None:
    with torch.inference_mode():  # the mode belongs to a thread
        job()


def _run_alone(job: Callable[[], None]) -> None:
    """Run a job of `submit`, and log an exception that nobody would see."""
    try:
        _run(job)
    except BaseException:
        log.exception("a job of the device queue raised an error that it should have handled")
        raise
