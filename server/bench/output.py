"""What the commands that measure share: flags, their checks, figures as JSON, and plots."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...configs.options import ConfigError

Values = Mapping[str, tuple[int | float | str, str]]  # flag -> its default, and what it means
_STANDARD_OUTPUT = "-"


def add_values(parser: argparse._ActionsContainer, flags: Values) -> None:
    """Add flags that have a value of the default's type."""
    for flag, (default, text) in flags.items():
        kind = type(default)
        shown = f"{default:g}" if kind is float else default
        text = f"{text} (default: {shown})"
        metavar = kind.__name__.upper()
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def check_least(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise ConfigError if an argument, by its name, is below the least value that it may have."""
    for name, bound in least.items():
        value = vars(args)[name]
        if value is not None and value < bound:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {bound}, not {value}")


def add_output(parser: argparse._ActionsContainer, *older: str) -> None:
    """Add --output to a benchmark's parser; `older` are former spellings that still work."""
    text = "write the figures as JSON to this file, or to standard output (-, tables then go to"
    text += " standard error)"
    parser.add_argument("--output", *older, dest="output", metavar="FILE", help=text)


def check_file(flag: str, path: str | None) -> None:
    """Raise ConfigError if the file cannot be written, before any time is spent on measuring."""
    if not path or path == _STANDARD_OUTPUT:
        return
    file = Path(path)
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist")
    if file.is_dir():
        raise ConfigError(f"{flag} {path}: it must be a file, but is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: it cannot be written (permission denied)")


@contextlib.contextmanager
def tables_to_stderr(path: str | None) -> Iterator[None]:
    """Print to standard error within this context if the figures go to standard output."""
    if path != _STANDARD_OUTPUT:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def write_figures(path: str | None, figures: Any) -> None:
    """Write the figures to `path`, if one is given; `-` is standard output.

    If the file cannot be written, prints them instead, so that they are not lost, and raises
    ConfigError."""
    if not path:
        return
    text = json.dumps(figures, indent=2) + "\n"
    if path == _STANDARD_OUTPUT:
        print(text, end="", flush=True)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:  # for example, the disk is full or the folder was removed
        print(text, end="", flush=True)
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"--output {path}: {why}; the figures were printed instead") from None


def check_plot(path: str | None) -> None:
    """Raise ConfigError if the plot cannot be drawn, before any time is spent on measuring."""
    if path is None:
        return
    check_file("--plot", path)
    if not path.endswith(".png"):
        raise ConfigError(f"--plot {path}: must end in .png")


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    return figure, figure.subplots()


def plot_offline(figures: dict[str, Any], path: str) -> None:
    """Plot decode tokens per second over batch size, one line per run, and save it as PNG."""
    figure, axes = _axes()
    for run in figures["runs"]:
        rows = run["results"]
        batches = [row["batch"] for row in rows]
        axes.plot(batches, [row["decode_tok_s"] for row in rows], marker="o", label=run["name"])
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="decode tokens/s")
    axes.set_title(str(figures["model"]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_serve(figures: dict[str, Any], path: str) -> None:
    """Plot the cumulative distribution of each latency, and save it as PNG."""
    figure, axes = _axes()
    for name, values in figures["samples"].items():
        ordered = sorted(values)
        if ordered:
            shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
            axes.plot([1e3 * value for value in ordered], shares, label=name)
    axes.set(xscale="log", xlabel="milliseconds", ylabel="cumulative share")
    axes.set_title(f"{figures['model']}, {figures['output_throughput']:.0f} tokens/s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
