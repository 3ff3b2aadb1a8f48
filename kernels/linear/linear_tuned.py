"""Chooses the linear kernel for a shape and GPU, and stores measured choices on disk.

A choice comes from measurements with the same GPU model and the same kernels, or else from the
built-in table or rule for Hopper GPUs, or else torch computes the layer. The scripts of `tests/lab`
measure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..device import card_of, use_triton
from .linear_choice import (
    H100_WINNERS,
    ROLES,
    WIDE,
    Choice,
    Gemv,
    Shape,
    Skinny,
    Wide,
    bucket_of,
    default_choice,
    fits,
    hopper_choice,
)

logger = logging.getLogger(__name__)
MODES = ("auto", "torch", "triton")
Winners = Mapping[tuple[Shape, int], Choice]
Rule = Callable[[Shape, int], Choice]
_KINDS: dict[str, type[Gemv] | type[Skinny]] = {"gemv": Gemv, "skinny": Skinny}
_SOURCES = ("linear_choice.py", "triton/gemv.py", "triton/skinny.py", "../launch.py")


class LinearChooser:
    """Chooses kernels for a model; a `rule` chooses those of shapes without measurements, and
    `wide` has those for more rows than any bucket, see `linear_choice.WIDE`."""

    def __init__(
        self,
        winners: Winners,
        rule: Rule | None = None,
        wide: Mapping[str, tuple[int, Wide]] | None = None,
    ) -> None:
        self._winners = winners
        self._rule = rule
        self._wide = wide or {}
        self._chosen: dict[tuple[Shape, int], Choice] = {}

    def choose(self, shape: Shape, num_rows: int) -> Choice:
        """The kernel for a layer of this shape and `num_rows` padded rows."""
        key = shape, num_rows
        if key not in self._chosen:
            self._chosen[key] = self._look_up(shape, num_rows)
        return self._chosen[key]

    def _look_up(self, shape: Shape, num_rows: int) -> Choice:
        bucket = bucket_of(num_rows)
        if bucket is None:
            least, wide = self._wide.get(shape.role, (0, None))
            return wide if num_rows >= least and fits(wide, shape, num_rows) else None
        choice = self._winners.get((shape, bucket))
        if (shape, bucket) not in self._winners and self._rule is not None:
            choice = self._rule(shape, num_rows)
        return choice if fits(choice, shape, num_rows) else None


def create_chooser(mode: str, device: torch.device, dtype: torch.dtype) -> LinearChooser | None:
    """The chooser for `--linear-backend mode`, or None if torch computes everything."""
    if mode == "torch" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if not use_triton(torch.empty(0, device=device)):
        return None
    card = card_of(device)
    if card is None:  # Triton's interpreter
        return LinearChooser({}, default_choice if mode == "triton" else None)
    is_hopper = card.capability == (9, 0)
    winners = dict(H100_WINNERS) if is_hopper else {}
    winners.update(load_tuned(card_name(device), dtype))
    if mode == "auto" and not winners:
        return None
    rule = default_choice if mode == "triton" else hopper_choice if is_hopper else None
    return LinearChooser(winners, rule, WIDE if is_hopper else None)


def card_name(device: torch.device) -> str:
    """The GPU's name and its number of multiprocessors, since MIG slices share names."""
    card = card_of(device)
    assert card is not None, "not a GPU"
    return f"{card.name} {card.num_processors}"


# --- on disk --------------------------------------------------------------------------------------


def load_tuned(card: str, dtype: torch.dtype) -> dict[tuple[Shape, int], Choice]:
    """Load the choices measured for this GPU with these kernels; empty if there are none, or if the
    file cannot be read (which is logged)."""
    path = tuned_path(card, dtype)
    if path is None or not path.exists():
        return {}
    try:
        return _parse(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("cannot read the measured linear kernels in %s: %s", path, error)
        return {}


def save_tuned(card: str, dtype: torch.dtype, found: Winners) -> Path | None:
    """Add measurements to this GPU's file, atomically, and return its path.

    Returns None if there is no directory for it, or if it cannot be written (which is logged).
    """
    path = tuned_path(card, dtype)
    if path is None:
        return None
    merged = {**load_tuned(card, dtype), **found}
    shapes: dict[str, dict[str, list[object] | None]] = {}
    for (shape, bucket), choice in sorted(merged.items(), key=lambda item: str(item[0])):
        name = f"{shape.role} {shape.outputs}x{shape.inputs}"
        kind = "gemv" if isinstance(choice, Gemv) else "skinny"
        line: list[object] | None = None if choice is None else [kind, *astuple(choice)]
        shapes.setdefault(name, {})[str(bucket)] = line
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=".tuned", delete=False
        ) as file:
            json.dump({"card": card, "dtype": str(dtype), "choices": shapes}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot save the measured linear kernels to %s: %s", path, error)
        return None
    return path


def tuned_path(card: str, dtype: torch.dtype) -> Path | None:
    """The file for measurements of `card`; None if the user has no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache_dir = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", f"{card} {dtype}".lower()).strip("-")
    return cache_dir / "slipstream" / "linear" / f"{slug}-{_version()}.json"


@cache
def _version() -> str:
    """A hash of the kernels, Triton and torch; measurements with another version are ignored."""
    digest = hashlib.sha256(torch.__version__.encode())
    if importlib.util.find_spec("triton") is not None:
        import triton

        digest.update(triton.__version__.encode())
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def _parse(content: Any) -> dict[tuple[Shape, int], Choice]:
    found: dict[tuple[Shape, int], Choice] = {}
    for name, of_rows in content["choices"].items():
        role, _, size = name.partition(" ")
        outputs, inputs = map(int, size.split("x"))
        if role not in ROLES:
            raise ValueError(f"unknown layer role {role!r}")
        for bucket, line in of_rows.items():
            choice: Choice = None
            if line is not None:
                kind, *sizes = line
                choice = _KINDS[kind](*map(int, sizes))
            found[Shape(role, outputs, inputs), int(bucket)] = choice
    return found
