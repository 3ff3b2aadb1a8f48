"""Detects a worker that hangs: it has requests but has finished no step for a long time.

ZeroMQ's heartbeats detect a frozen process; this detects one that runs without making progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_TICKS = 10  # checks within one time-out


class Watchdog:
    """Counts the checks that find the worker busy and silent, instead of measuring seconds.

    If the server itself was suspended for an hour (Ctrl-Z, a frozen container), it counts one check
    and then reads the worker's messages, so there is no false alarm.
    """

    def __init__(self, timeout: float, is_busy: Callable[[], bool]) -> None:
        """`timeout` is in seconds, 0 disables the watchdog; `is_busy` says if a step is due."""
        self._timeout = timeout
        self._is_busy = is_busy
        self._silent = 0

    def feed(self) -> None:
        """Reset the watchdog; called for every message of the worker."""
        self._silent = 0

    async def bite(self) -> None:
        """Return when the worker has been busy and silent for `timeout` seconds."""
        if self._timeout <= 0:
            await asyncio.Event().wait()
        while self._silent <= _TICKS:
            await asyncio.sleep(self._timeout / _TICKS)
            self._silent = self._silent + 1 if self._is_busy() else 0
