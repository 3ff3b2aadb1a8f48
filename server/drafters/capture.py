"""Keeps the prompts of live requests for a drafter's training, where the operator asked for it.

Without `--capture-traffic` nothing of this runs. Prompts only: the target writes its own replies
when a head is trained. They are written as token ids, off the event loop, until the file is full.
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


_MAX_WAITING = 4 << 20  # tokens that a slow disk has not taken yet, 8 bytes each and more


class TrafficCapture:
    """Appends to `prompts.jsonl` in a folder that only this user can read.

    The file may be moved away while the server runs, also when it is full: the next prompt begins
    another, as private as the first. A folder or file that exists keeps its mode, which its owner
    chose. Raises OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / "prompts.jsonl"
        self._max_bytes = max_bytes
        os.close(self._open())
        self._has_failed = False
        self._is_full = False
        self._lock = Lock()
        self._num_waiting = 0  # tokens
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capture")
        log.warning("the prompts of all requests are written to %s", self.path)

    def record(self, prompts: Sequence[Sequence[int]]) -> None:
        """Keep the prompts of one request, unless the disk is too slow for it; returns at once."""
        size = sum(map(len, prompts))
        if not self._has_failed and self._num_waiting + size <= _MAX_WAITING:
            self._count(size)
            self._writer.submit(self._write, [list(prompt) for prompt in prompts], size)

    def close(self) -> None:
        """Write what is on its way."""
        self._writer.shutdown(wait=True)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_waiting += change

    def _write(self, prompts: list[list[int]], size: int) -> None:
        try:
            if not self._has_failed:
                self._append("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
        except OSError as error:  # a full disk must not end requests
            self._has_failed = True
            self._warn(str(error.strerror or error))
        except Exception:  # a bug, which nobody would see: the executor keeps it
            self._has_failed = True
            log.exception("no more prompts are written to %s", self.path)
        finally:
            self._count(-size)

    def _append(self, lines: str) -> None:
        """Write the lines if there is room for all of them."""
        data = lines.encode()
        with open(self._open(), "ab") as file:
            size = os.fstat(file.fileno()).st_size
            was_full = self._is_full and size > 0  # else it was moved away
            self._is_full = was_full or size + len(data) > self._max_bytes
            if not self._is_full:
                file.write(data)
        if self._is_full and not was_full:
            self._warn(f"it has reached {self._max_bytes} bytes; move it away to go on")

    def _open(self) -> int:
        """A descriptor that appends to the file; a new one is this user's alone."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _warn(self, reason: str) -> None:
        log.warning("no more prompts are written to %s: %s", self.path, reason)
