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

log = logging.getLogger("slipstream.capture")


class TrafficCapture:
    """Appends to `prompts.jsonl` in a folder that only this user can read.

    Raises OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / "prompts.jsonl"
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        self._max_bytes = max_bytes
        self._size = self.path.stat().st_size
        self._is_full = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capture")
        log.warning("the prompts of all requests are written to %s", self.path)

    def record(self, prompts: Sequence[Sequence[int]]) -> None:
        """Keep the prompts of one request; returns at once."""
        if not self._is_full:
            self._writer.submit(self._write, [list(prompt) for prompt in prompts])

    def close(self) -> None:
        """Write what is on its way."""
        self._writer.shutdown(wait=True)

    def _write(self, prompts: list[list[int]]) -> None:
        lines = "".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts).encode()
        if self._is_full or self._size + len(lines) > self._max_bytes:
            self._stop(f"it has reached {self._max_bytes} bytes")
            return
        try:
            with self.path.open("ab") as file:
                file.write(lines)
        except OSError as error:  # a full disk must not end requests
            self._stop(str(error.strerror or error))
            return
        self._size += len(lines)

    def _stop(self, reason: str) -> None:
        if not self._is_full:
            log.warning("no more prompts are written to %s: %s", self.path, reason)
        self._is_full = True
