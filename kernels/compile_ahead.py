"""Compiles kernels ahead of time: inside `compiling_only`, a launch compiles but runs nothing.

The compiled kernels go to Triton's cache on disk, where this and other processes find them. The
module knows no particular kernel and needs Triton 3.6 or later. Meta tensors (see `device`) suffice
as arguments, since only their type and alignment matter.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .compile_log import watch_compilations
from .device import Card, meta_tensors_on

_COMPILED, _FAILED, _CACHED = 0, 1, 2  # exit statuses


@contextmanager
def compiling_only(executor: Executor) -> Iterator[dict[Any, Any]]:
    """Inside, each launch of a Triton kernel only submits its compilation to `executor`.

    A kernel is compiled once for each specialization. Yields a dictionary from key to
    `FutureKernel` that grows with every new one. Leaving the block waits for all of them and shuts
    `executor` down. It raises nothing if a compilation failed: `FutureKernel.future` has its error.

    Only this thread may launch kernels meanwhile: in other threads, too, a launch would run
    nothing. No graph may be captured meanwhile, and blocks cannot be nested.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    mode = AsyncCompileMode(executor, ignore_errors=True)

    def submit(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if hasattr(kernel, "finalize_compile") and kernel.kernel is None:
            kernel.finalize_compile(kernel)  # the next launch finds the compiled kernel itself
        return kernel

    with mode:
        JITFunction.run = submit
        try:
            yield mode.future_kernels
        finally:
            JITFunction.run = launch
            executor.shutdown(wait=True)


class ForkingExecutor(Executor):
    """Runs each job in a fork of this process, at most `max_workers` at once.

    A job's result is True if it compiled something, and False if everything was on disk. If the
    job failed, the fork prints a traceback and its future has a RuntimeError. Futures become done
    only within `submit` and `shutdown`, so wait for them with `shutdown`. The process must have a
    single thread, no CUDA context and no other child processes.

    Threads would be slower: a compilation holds Python's lock for a fifth of its time.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._running: dict[int, Future[Any]] = {}  # by process id

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start `fn` in a fork, after waiting until fewer than `max_workers` jobs are running."""
        while len(self._running) >= self._max_workers:
            self._reap()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda: fn(*args, **kwargs))
        self._running[pid] = future
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all jobs, unless `wait` is false."""
        while wait and self._running:
            self._reap()

    def _reap(self) -> None:
        pid, status = os.wait()
        future = self._running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code in (_COMPILED, _CACHED):
            future.set_result(code == _COMPILED)
        else:
            future.set_exception(RuntimeError(f"a compilation ended with status {code}"))


def _run_and_exit(job: Callable[[], Any]) -> None:
    status = _FAILED
    try:
        log = watch_compilations()
        before = len(log.compiled)
        job()
        status = _COMPILED if len(log.compiled) > before else _CACHED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextmanager
def without_gpu(card: Card) -> Iterator[None]:
    """Inside, meta tensors are treated as tensors on `card`, and Triton compiles for it without a
    driver.

    This process cannot run kernels afterwards: Triton keeps the stand-in for its driver.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = card.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: target,
        )
    )
    with meta_tensors_on(card):
        yield
