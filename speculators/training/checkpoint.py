"""The files of a training run: its checkpoint, written atomically and read by this run alone, and
the log of its measures.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at `path` atomically, so that a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".writing")
    torch.save(content, scratch)
    os.replace(scratch, path)


def load_checkpoint(
    path: Path, fingerprint: dict[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """The content of a checkpoint, or None if there is no file.

    Raises ValueError, naming the differences, if another run wrote it, or if it is unreadable.
    """
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # an incomplete or foreign file can raise anything
        raise ValueError(f"{path} is not a training checkpoint; remove it.") from error
    theirs = saved.get("fingerprint", {})
    different = [name for name, value in fingerprint.items() if theirs.get(name) != value]
    if different:
        raise ValueError(
            f"{path} belongs to a run with different {', '.join(different)}; remove the file to "
            "start over, or train in another folder."
        )
    return saved


class ProgressLog:
    """Appends to a file. Every line has a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def cut(self, step: int) -> None:
        """Drop the lines after `step`, because these steps will be repeated."""
        if not self.path.exists():
            return
        kept = [line for line in self.lines() if line["step"] <= step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def lines(self) -> list[dict[str, Any]]:
        """All lines, except an unfinished last one."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found
