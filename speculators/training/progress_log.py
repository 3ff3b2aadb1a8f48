"""The log of a training run: one JSON object per line. A resumed run drops the lines it repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
