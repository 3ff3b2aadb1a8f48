"""Plots the curves of a training run as a PNG file, without a plotting library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .progress_log import ProgressLog

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM, _SCALE = 900, 260, 70, 150, 34, 26, 2
_INK, _GRID, _PAPER = (40, 40, 40), (222, 222, 222), (255, 255, 255)
_COLOURS = (
    *((31, 119, 180), (214, 39, 40), (44, 160, 44), (255, 127, 14)),
    *((148, 103, 189), (23, 190, 207), (140, 86, 75), (127, 127, 127)),
)
# A bitmap font of 3 x 5 pixels per character; each octal digit is a row of three pixels.
_FONT = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717,
    "6": 0o74757, "7": 0o71111, "8": 0o75757, "9": 0o75717, ".": 0o00002, "-": 0o00700,
    "a": 0o25755, "b": 0o65656, "c": 0o34443, "d": 0o65556, "e": 0o74647, "f": 0o74644,
    "g": 0o34553, "h": 0o55755, "i": 0o72227, "j": 0o11152, "k": 0o55655, "l": 0o44447,
    "m": 0o57755, "n": 0o65555, "o": 0o25552, "p": 0o65644, "q": 0o25563, "r": 0o65655,
    "s": 0o34216, "t": 0o72222, "u": 0o55557, "v": 0o55552, "w": 0o55775, "x": 0o55255,
    "y": 0o55222, "z": 0o71247, " ": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One curve of a panel."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def plot_training(log: ProgressLog, path: Path) -> None:
    """Plot loss, agreement by draft, and held-out acceptance over the steps, in a panel each."""
    lines = log.lines()
    panels = [
        ("loss", [_curve(lines, "loss"), _curve(lines, "heldout_loss", "held-out")]),
        ("agreement with the target by draft", _by_draft(lines, "agreement")),
        ("held-out acceptance by draft", _by_draft(lines, "heldout_acceptance")),
        ("held-out acceptance length", [_curve(lines, "heldout_length", "length")]),
    ]
    drawn = [_panel(title, [c for c in curves if c.x]) for title, curves in panels]
    path.write_bytes(png(np.concatenate(drawn)))


def png(pixels: Pixels) -> bytes:
    """Encode RGB pixels [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        checked = kind + body
        return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*part) for part in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    )


def _curve(lines: Sequence[dict[str, Any]], key: str, name: str | None = None) -> Curve:
    found = [line for line in lines if key in line]
    return Curve(name or key, [line["step"] for line in found], [line[key] for line in found])


def _by_draft(lines: Sequence[dict[str, Any]], key: str) -> list[Curve]:
    found = [line for line in lines if key in line]
    count = len(found[0][key]) if found else 0
    steps = [line["step"] for line in found]
    return [Curve(f"draft {k}", steps, [line[key][k] for line in found]) for k in range(count)]


def _panel(title: str, curves: Sequence[Curve]) -> Pixels:
    image = np.full((_PANEL, _WIDTH, 3), _PAPER, np.uint8)
    _write(image, _LEFT, 10, title)
    if not curves:
        return image
    low_x, high_x = _span([x for curve in curves for x in curve.x])
    low_y, high_y = _span([y for curve in curves for y in curve.y])
    right, bottom = _WIDTH - _RIGHT, _PANEL - _BOTTOM
    for tick in range(5):
        share = tick / 4
        y = round(bottom - share * (bottom - _TOP))
        image[y, _LEFT:right] = _GRID
        _write(image, 4, y - 5, _number(low_y + share * (high_y - low_y)))
        x = round(_LEFT + share * (right - _LEFT))
        image[_TOP:bottom, min(x, right - 1)] = _GRID
        _write(image, x - 12, bottom + 8, _number(low_x + share * (high_x - low_x)))
    for index, curve in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        xs = _LEFT + (np.array(curve.x) - low_x) / (high_x - low_x) * (right - _LEFT - 1)
        ys = bottom - (np.array(curve.y) - low_y) / (high_y - low_y) * (bottom - _TOP)
        _draw(image, xs, ys, colour)
        image[_TOP + 18 * index + 3 : _TOP + 18 * index + 7, right + 10 : right + 26] = colour
        _write(image, right + 32, _TOP + 18 * index, curve.name)
    return image


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and highest value, widened if they are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def _draw(
    image: Pixels,
    xs: npt.NDArray[np.float64],
    ys: npt.NDArray[np.float64],
    colour: tuple[int, int, int],
) -> None:
    """Draw a line two pixels wide through the points."""
    ends = range(max(1, len(xs) - 1))
    for a, b in ((i, min(i + 1, len(xs) - 1)) for i in ends):
        count = int(max(abs(xs[b] - xs[a]), abs(ys[b] - ys[a]))) + 2
        x = np.linspace(xs[a], xs[b], count).round().astype(int)
        y = np.linspace(ys[a], ys[b], count).round().astype(int)
        for shift in (0, 1):
            image[np.clip(y + shift, 0, _PANEL - 1), np.clip(x, 0, _WIDTH - 1)] = colour


def _write(image: Pixels, x: int, y: int, text: str) -> None:
    for character in text.lower():
        bits = _FONT.get(character, 0)
        for row in range(5):
            for column in range(3):
                if bits >> (14 - 3 * row - column) & 1:
                    top, left = y + row * _SCALE, x + column * _SCALE
                    image[top : top + _SCALE, left : left + _SCALE] = _INK
        x += 4 * _SCALE
