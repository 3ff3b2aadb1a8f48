"""A training run's checkpoint file: written whole or not at all, read only by the run it is of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at `path` in one move, so that a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".writing")
    torch.save(content, scratch)
    os.replace(scratch, path)


def load_checkpoint(
    path: Path, fingerprint: dict[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """The content of a checkpoint, or None if there is no file.

    ValueError names what differs if the run that wrote it was another one.
    """
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a torn or foreign file fails in many ways
        raise ValueError(f"{path} is no checkpoint of a training run; remove it.") from error
    theirs = saved.get("fingerprint", {})
    different = [name for name, value in fingerprint.items() if theirs.get(name) != value]
    if different:
        raise ValueError(
            f"{path} belongs to a run with other {', '.join(different)}; remove the file to begin "
            "anew, or train in another folder."
        )
    return saved
