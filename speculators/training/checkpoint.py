"""The checkpoint file of a training run: written atomically, read only by the run that it is
from."""

from __future__ import annotations

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
