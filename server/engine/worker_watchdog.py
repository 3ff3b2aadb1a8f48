"""Owns the suspicion that a worker hangs: it has requests, but no step of it has ended for long.

ZeroMQ's heartbeats find a process that is frozen; this finds one that lives and makes no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_TICKS = 10  # looks within one time-out


class Watchdog:
    """Counts looks at a busy and silent worker, not seconds.

    A server that was itself stopped for an hour (Ctrl-Z, a frozen container) then takes one look,
    reads what has come meanwhile, and suspects nobody.
    """

    def __init__(self, timeout: float, is_busy: Callable[[], bool]) -> None:
        """`timeout` in seconds; 0 never suspects. `is_busy` says whether a step is owed."""
        self._timeout = timeout
        self._is_busy = is_busy
        self._silent = 0

    def feed(self) -> None:
        """The worker said something."""
        self._silent = 0

    async def bite(self) -> None:
        """Return once the worker has been busy and silent for as long as the time-out."""
        if self._timeout <= 0:
            await asyncio.Event().wait()
        while self._silent <= _TICKS:
            await asyncio.sleep(self._timeout / _TICKS)
            self._silent = self._silent + 1 if self._is_busy() else 0
