"""Owns the file that takes a benchmark's figures as JSON: `--output FILE` of `slipstream bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...configs.options import ConfigError

_STANDARD_OUTPUT = "-"


def add_output(parser: argparse._ActionsContainer, *older: str) -> None:
    """The flag, the same in all benchmarks; `older` are former spellings that still work."""
    text = "write JSON there; - is the output, and tables then go to the standard error"
    parser.add_argument("--output", *older, dest="output", metavar="FILE", help=text)


def check_file(flag: str, path: str | None) -> None:
    """ConfigError before anything is measured if a file could not be written there."""
    if not path or path == _STANDARD_OUTPUT:
        return
    file = Path(path)
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist")
    if file.is_dir():
        raise ConfigError(f"{flag} {path}: it is a folder, and must be a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: it cannot be written: permission denied")


@contextlib.contextmanager
def tables_aside(path: str | None) -> Iterator[None]:
    """Where the figures go to the standard output, what is printed here goes to the error."""
    if path != _STANDARD_OUTPUT:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def write_figures(path: str | None, figures: Any) -> None:
    """Write them, if a file was asked for. If that fails now they are printed, and ConfigError."""
    if not path:
        return
    text = json.dumps(figures, indent=2) + "\n"
    if path == _STANDARD_OUTPUT:
        print(text, end="", flush=True)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:  # the disk is full, or the folder is gone since the check
        print(text, end="", flush=True)
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"--output {path}: {why}; the figures were printed instead") from None
