"""Measured choices of kernels for quantised weights, on disk.

`tests/lab/measure_packed.py --save` writes them. They hold for one model of GPU and one version of
the kernels, and come before the built-in table.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

from ..device import cache_by_device, card_of
from ..linear.linear_choice import Gemv, Shape, Skinny
from ..linear.linear_tuned import card_name, tuned_path
from .kinds import Codes, Direct, PackedChoice, Row

logger = logging.getLogger(__name__)
Key: TypeAlias = tuple[str, Shape, int | None]  # name of the format, shape, upper bound of rows
_KINDS: Mapping[str, type[Gemv] | type[Skinny] | type[Row] | type[Direct] | type[Codes]] = {
    kind.__name__: kind for kind in (Gemv, Skinny, Row, Direct, Codes)
}


@cache_by_device
def tuned_choices(device: torch.device) -> dict[Key, PackedChoice]:
    """The choices measured on this device; empty if there are none, or if the file cannot be read
    (which is logged)."""
    path = _path(device)
    if path is None or not path.exists():
        return {}
    try:
        return dict(map(_parse, json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("cannot read the measured kernels in %s: %s", path, error)
        return {}


def save_choices(device: torch.device, found: Mapping[Key, PackedChoice]) -> Path | None:
    """Add measurements to the file of a GPU, atomically; returns its path, None without one."""
    path = _path(device)
    if path is None:
        return None
    merged = {**tuned_choices(device), **found}
    lines = [
        [name, *astuple(shape), bucket, type(choice).__name__, astuple(choice) if choice else ()]
        for (name, shape, bucket), choice in merged.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".tuned", delete=False) as file:
        json.dump(lines, file, indent=1)
    os.replace(file.name, path)
    return path


def _parse(line: list[object]) -> tuple[Key, PackedChoice]:
    name, role, outputs, inputs, bucket, kind, sizes = line
    shape = Shape(str(role), int(str(outputs)), int(str(inputs)))
    choice: PackedChoice = None
    if kind != "NoneType":
        assert isinstance(sizes, list)
        choice = _KINDS[str(kind)](*map(int, sizes))
    return (str(name), shape, int(str(bucket))), choice


def _path(device: torch.device) -> Path | None:
    card = card_of(device)
    if card is None or device.type == "meta":
        return None
    return tuned_path(f"{card_name(device)} packed {_version()}", torch.bfloat16)


@cache
def _version() -> str:
    """A hash of the kernels; measurements with other kernels are ignored."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("**/triton/*.py"), *here.glob("../quant/triton/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
