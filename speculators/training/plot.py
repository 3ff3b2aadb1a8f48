"""Plots the curves of a training run as a PNG file."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import ProgressLog

# Title of a panel -> key in the log and name of each curve. A list in the log has a value by draft.
_PANELS = {
    "loss": {"loss": "loss", "heldout_loss": "held-out"},
    "agreement with the target by draft": {"agreement": "draft"},
    "held-out acceptance by draft": {"heldout_acceptance": "draft"},
    "held-out acceptance length": {"heldout_length": "length"},
}


def plot_training(log: ProgressLog, path: Path) -> None:
    """Plot loss, agreement by draft, and held-out acceptance over the steps, in a panel each."""
    from matplotlib.figure import Figure  # slow to import

    lines = log.lines()
    figure = Figure(figsize=(9.0, 10.4), layout="constrained")
    for place, (title, curves) in enumerate(_PANELS.items(), 1):
        axes = figure.add_subplot(len(_PANELS), 1, place, title=title)
        axes.grid(alpha=0.3)
        for key, name in curves.items():
            if found := [line for line in lines if key in line]:
                values = [line[key] for line in found]
                by_draft = isinstance(values[0], list)
                names = [f"{name} {k}" for k in range(len(values[0]))] if by_draft else name
                axes.plot([line["step"] for line in found], values, marker=".", label=names)
                axes.legend()
    figure.savefig(path)
