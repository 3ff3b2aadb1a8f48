"""Owns how the start-up of the worker looks: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from ..runner.messages import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

_NAMES = {
    "load": "loading weights",
    "kv_cache": "allocating KV blocks",
    "capture": "capturing CUDA graphs",
}


class StartupProgress:
    """Call it with each Progress message; `close` ends the last phase."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self.close()
            self._phase, self._began = progress.phase, time.monotonic()
            self._open(progress)
        if self._bar is not None:
            self._bar.total = progress.total
            self._bar.set_postfix_str(progress.detail, refresh=False)
            self._bar.update(progress.done - self._bar.n)
            self._bar.refresh()

    def _open(self, progress: Progress) -> None:
        name = _NAMES.get(progress.phase, progress.phase)
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=progress.total, desc=name, file=self._stream, leave=True)
        else:
            detail = f" ({progress.detail})" if progress.detail else ""
            self._print(f"{name}{detail} ...")

    def close(self) -> None:
        """End the phase that is shown."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._phase is not None:
            name = _NAMES.get(self._phase, self._phase)
            seconds = time.monotonic() - self._began
            self._print(f"{name}: done in {seconds:.1f} s")
        self._phase = None

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep a server from starting
            print(line, file=self._stream, flush=True)
