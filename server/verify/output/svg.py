"""Draws the plots of a report as inline SVG, in the colours of the page.

Text is in em of the page and bars scale with its width, so that the plots are readable on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _LEFT, _RIGHT = 640, 34, 200, 76  # units of the view box
_BAR = 14


@dataclass(frozen=True)
class Row:
    """A bar from zero, with a tick for what it is compared with."""

    name: str
    value: float
    label: str  # the value for people
    limit: float | None = None
    is_bad: bool = False


def bars(title: str, rows: Sequence[Row], top: float | None = None) -> str:
    """Horizontal bars, one a row, each with its limit as a tick; `top` is the end of the axis."""
    most = top or max((max(row.value, row.limit or 0.0) for row in rows), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    parts = []
    for place, row in enumerate(rows):
        y = place * _ROW + 8
        width = max(1.0, min(row.value, most) * scale)
        kind = "bad" if row.is_bad else "bar"
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(row.name)}</text>'
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
        )
        end = _LEFT + width
        if row.limit is not None:
            x = _LEFT + min(row.limit, most) * scale
            parts.append(f'<path class="tick" d="M{x:.1f} {y - 4}v{_BAR + 8}"/>')
            end = max(end, x)
        parts.append(f'<text x="{end + 6:.1f}" y="{y + 12}">{escape(row.label)}</text>')
    return _figure(title, len(rows) * _ROW + 8, parts)


def dots(title: str, values: Sequence[float], one: float, unit: str) -> str:
    """A dot for each value on one axis, with a line at `one`."""
    low, high = min([*values, one]), max([*values, one])
    room = (high - low) * 0.08 or 0.1
    low, high = low - room, high + room

    def x(value: float) -> float:
        return 20 + (value - low) / (high - low) * (_WIDTH - 40)

    parts = [f'<path class="axis" d="M20 40h{_WIDTH - 40}"/>']
    parts.append(f'<path class="tick" d="M{x(one):.1f} 20v40"/>')
    parts += [f'<circle class="bar" cx="{x(value):.1f}" cy="40" r="6"/>' for value in values]
    for value, anchor in ((min(values), "start"), (max(values), "end")):
        label = escape(f"{value:.2f} {unit}")
        parts.append(f'<text x="{x(value):.1f}" y="78" text-anchor="{anchor}">{label}</text>')
    return _figure(title, 88, parts)


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    name = escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg></figure>'
    )
