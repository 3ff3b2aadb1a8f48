"""Counts the kernels that Triton compiles in this process, and those that it finds on disk.

A kernel compiled after the worker is ready delays a request, so each one is logged.
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
    """Compilations since the first call of `watch_compilations`; a listener that Triton calls."""

    compiled: list[str] = field(default_factory=list)  # names of kernels
    seconds: float = 0.0  # spent compiling them, summed over threads
    num_cached: int = 0  # found on disk
    is_ready: bool = False  # once true, every further compilation is logged as a warning
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        """Record one compilation (Triton's `CompilationListener`); times are in microseconds."""
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
        """The summary that the start-up log shows, in one line."""
        return (
            f"kernels: {len(self.compiled)} compiled by the worker itself in {self.seconds:.1f} s, "
            f"{self.num_cached} from Triton's cache"
        )


@cache
def watch_compilations() -> CompileLog:
    """The log of this process, counting from the first call; it stays empty without Triton."""
    log = CompileLog()
    if importlib.util.find_spec("triton") is None:
        return log
    try:
        from triton import knobs
    except ImportError:  # Triton before 3.4 has no listeners
        return log
    knobs.compilation.listener = log
    return log
