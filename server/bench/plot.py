"""Draws the figures of a benchmark as PNG."""

from __future__ import annotations

from typing import Any

from ...configs.options import ConfigError
from .output import check_file


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
