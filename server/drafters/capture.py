"""Writes the prompts of live requests to a file for a drafter's training (`--capture-traffic`).

Without the flag, nothing here runs. Only prompts are written, because the target generates its own
replies for the training. They are written as token ids by a thread, until the file is full.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

log = logging.getLogger("slipstream.capture")

_MAX_WAITING = 4 << 20  # tokens that may wait for a slow disk; each takes 8 bytes or more


class TrafficCapture:
    """Appends prompts to `prompts.jsonl`, which only this user can read, up to `max_bytes`.

    The file may be moved away while the server runs, even after it is full: the next prompt then
    starts a new file with the same permissions. An existing folder or file keeps its permissions.
    Raises OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / "prompts.jsonl"
        self._max_bytes = max_bytes
        os.close(self._open())
        self._has_failed = False
        self._is_full = False
        self._lock = Lock()
        self._num_waiting = 0  # tokens handed to the thread and not written yet
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capture")
        log.warning("the prompts of all requests are written to %s", self.path)

    def record(self, prompts: Sequence[Sequence[int]]) -> None:
        """Queue the prompts of one request for writing, and return at once.

        Drops them if too many wait for the disk, or if writing has failed before."""
        size = sum(map(len, prompts))
        if not self._has_failed and self._num_waiting + size <= _MAX_WAITING:
            self._count(size)
            self._writer.submit(self._write, [list(prompt) for prompt in prompts], size)

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_waiting += change

    def _write(self, prompts: list[list[int]], size: int) -> None:
        try:
            if not self._has_failed:
                self._append("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
        except OSError as error:  # a full disk must not fail requests
            self._has_failed = True
            self._warn(str(error.strerror or error))
        except Exception:  # a bug, which the executor would hide
            self._has_failed = True
            log.exception("stopped writing prompts to %s", self.path)
        finally:
            self._count(-size)

    def _append(self, lines: str) -> None:
        """Write the lines if the file has room for all of them."""
        data = lines.encode()
        with open(self._open(), "ab") as file:
            size = os.fstat(file.fileno()).st_size
            was_full = self._is_full and size > 0  # an empty file means it was moved away
            self._is_full = was_full or size + len(data) > self._max_bytes
            if not self._is_full:
                file.write(data)
        if self._is_full and not was_full:
            self._warn(f"it has reached {self._max_bytes} bytes; move it away to continue")

    def _open(self) -> int:
        """Open the file for appending; a new file can be read only by this user."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _warn(self, reason: str) -> None:
        log.warning("stopped writing prompts to %s: %s", self.path, reason)
