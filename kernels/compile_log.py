"""Counts what Triton compiles in this process, and what it finds on disk instead.

A kernel that is compiled once the worker is ready makes a request wait for it: that is logged.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class CompileLog:
    """Compilations since `watch_compilations`; a listener of Triton's."""

    compiled: list[str] = field(default_factory=list)  # names of kernels
    seconds: float = 0.0  # that compiling them took; in several threads at once it adds up
    num_cached: int = 0  # found on disk
    is_ready: bool = False  # from here on nothing should be compiled
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        """Triton's `CompilationListener`; times are in microseconds."""
        with self._lock:
            if cache_hit:
                self.num_cached += 1
                return
            self.compiled.append(src.name)
            self.seconds += times.total / 1e6
        if self.is_ready:
            logger.warning(
                "the kernel %s was compiled while serving, in %.1f s", src.name, times.total / 1e6
            )

    def line(self) -> str:
        """One line for the start-up log."""
        return (
            f"kernels: {len(self.compiled)} compiled by the worker itself in {self.seconds:.1f} s, "
            f"{self.num_cached} from Triton's cache"
        )


@cache
def watch_compilations() -> CompileLog:
    """This process's log, which counts from the first call on; empty without Triton."""
    log = CompileLog()
    if importlib.util.find_spec("triton") is None:
        return log
    try:
        from triton import knobs
    except ImportError:  # before 3.4, which calls no listener
        return log
    knobs.compilation.listener = log
    return log
