"""Shows the progress of start-up and of counted work: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ..configs.logs import share_bars_between_threads
from ..runner.messages import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

_NAMES = {
    "download": "downloading",
    "load": "loading weights",
    "load_drafter": "loading the drafter",
    "kv_cache": "allocating KV blocks",
    "capture": "capturing CUDA graphs",
}
_IN_BYTES = ("download", "load", "load_drafter")
_LINE_SECONDS = 10.0


class StartupProgress:
    """Shows the phases of the worker's start.

    Call it with each Progress message. It is a context manager: leaving it ends the last phase,
    as stopped if an exception is raised.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self._end("done in")
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

            share_bars_between_threads()
            in_bytes = progress.phase in _IN_BYTES
            self._bar = tqdm(
                total=progress.total,
                desc=name,
                file=self._stream,
                leave=True,
                unit="B" if in_bytes else "it",
                unit_scale=in_bytes,
            )
        else:
            detail = f" ({progress.detail})" if progress.detail else ""
            _print(f"{name}{detail} ...", self._stream)

    def __enter__(self) -> StartupProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end("done in" if kind is None else "stopped after")

    def _end(self, how: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._phase is not None:
            name = _NAMES.get(self._phase, self._phase)
            seconds = time.monotonic() - self._began
            _print(f"{name}: {how} {seconds:.1f} s", self._stream)
        self._phase = None


class CountProgress:
    """Shows how many of `total` items are done; `update` counts one.

    It is a context manager: leaving it early reports how many items were done.
    """

    def __init__(
        self,
        name: str,
        total: int,
        noun: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._noun = name, total, noun
        self._stream, self._clock = stream or sys.stderr, clock
        self._bar: tqdm[Any] | None = None
        self._done, self._due = 0, 0.0

    def __enter__(self) -> CountProgress:
        if self._stream.isatty():
            from tqdm import tqdm

            share_bars_between_threads()
            self._bar = tqdm(total=self._total, desc=self._name, file=self._stream)
        else:
            self._print_count()
        return self

    def update(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._done == self._total or self._clock() >= self._due:
            self._print_count()

    def _print_count(self, how: str = "") -> None:
        self._due = self._clock() + _LINE_SECONDS
        line = f"{self._name}: {how}{self._done} of {self._total} {self._noun}"
        _print(line, self._stream)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._done < self._total:
            self._print_count("stopped after ")


def _print(line: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # a full disk must not keep a server from starting
        print(line, file=stream, flush=True)
