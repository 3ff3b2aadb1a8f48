"""Writes a report as one HTML file that needs nothing else: no script, no network, no fonts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..report import FALSE_ALARM, NULL_HYPOTHESIS, Check, Report, percent
from ..sampled import EVENTS

_MARKS = {"pass": "passed", "fail": "failed", "note": "note", "skip": "left out"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#fff;--line:#d1d9e0;
--good:#1a7f37;--bad:#cf222e;--bar:#2f6fd0}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--page:#0d1117;
--line:#3d444d;--good:#3fb950;--bad:#f85149;--bar:#6ea8fe}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:56rem;padding:1rem;background:var(--page);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
.verdict{border-left:.4rem solid;padding:.6rem 1rem;font-weight:600}
.pass{color:var(--good)}.fail{color:var(--bad)}.note,.skip{color:var(--soft)}
ul{list-style:none;padding:0;margin:0}
li{border-top:1px solid var(--line);padding:.5rem 0;display:grid;
grid-template-columns:5rem 14rem 1fr;gap:0 1rem}
li b{font-weight:600}
@media(max-width:40rem){li{grid-template-columns:5rem 1fr}li p{grid-column:1/-1}}
p{margin:0}.soft{color:var(--soft);font-size:.9rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:0 1rem;font-size:.9rem}
dt{color:var(--soft)}dd{margin:0}
figure{margin:1.5rem 0}figcaption{font-size:.9rem;color:var(--soft)}
svg{width:100%;height:auto;font:15px system-ui,sans-serif}
@media(max-width:40rem){svg{font-size:21px}}
svg text{fill:var(--ink)}.bar{fill:var(--bar)}rect.bad{fill:var(--bad)}
.tick{stroke:var(--ink);stroke-width:2}.axis{stroke:var(--line);stroke-width:2}
"""


def page(report: Report) -> str:
    setup = report.setup
    model = str(setup.get("model", setup.get("url", "")))
    kind = "pass" if report.passes else "fail"
    facts = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in setup.items()
        if value not in (None, "")
    )
    groups = "".join(_group(name, checks) for name, checks in report.groups().items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>slipstream verify: {escape(model)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Is speculation lossless? {escape(model)}</h1>"
        f'<p class="verdict {kind}">{escape(report.verdict())}</p>'
        f'<h2>Setup</h2><dl>{facts}</dl>{groups}<h2>How to read this</h2><p class="soft">'
        f"The null hypothesis of the statistical tests: {escape(NULL_HYPOTHESIS)}. A sound server "
        f"fails any of them with a probability of at most {FALSE_ALARM:g} in a whole report.</p>"
        "</body></html>\n"
    )


def _group(name: str, checks: list[Check]) -> str:
    rows = "".join(
        f'<li><span class="{check.status}">{_MARKS[check.status]}</span>'
        f"<b>{escape(check.name)}</b><p>{escape(check.summary)}</p></li>"
        for check in checks
    )
    return f"<h2>{escape(name)}</h2><ul>{rows}</ul>{''.join(_plots(checks))}"


def _plots(checks: list[Check]) -> list[str]:
    """The plots that the figures of these checks allow."""
    found = []
    for check in checks:
        figures = check.figures
        if shares := figures.get("acceptance"):
            rows = [Row(f"draft {n + 1}", s, percent(s)) for n, s in enumerate(shares)]
            found.append(bars(f"Accepted drafts by position, {check.name}", rows, 1.0))
        if ratios := figures.get("ratios"):
            found.append(dots("Speed-up of each prompt; the line is 1", ratios, 1.0, "times"))
    if rows := _distances(checks):
        title = "Total variation between replies with drafts and without; the tick: chance"
        found.append(bars(title, rows))
    if rows := _biases(checks):
        title = "Bias of how often an event happened; the tick: the least that is surely found"
        found.append(bars(title, rows))
    return found


def _distances(checks: list[Check]) -> list[Row]:
    return [
        Row(
            f"{check.name}, {part}", two["total_variation"], f"{two['total_variation']:.3f}",
            two["bound"], two["total_variation"] > two["bound"],
        )
        for check in checks
        for part, two in check.figures.items()
        if isinstance(two, dict) and "total_variation" in two and part == "token 1"
    ]  # fmt: skip


def _biases(checks: list[Check]) -> list[Row]:
    def row(name: str, bet: dict[str, Any], is_bad: bool) -> Row:
        size = abs(bet["bias"])
        return Row(name, size, percent(size), bet["detectable_bias"], is_bad)

    return [
        row(event, check.figures, check.status == "fail")
        for event in EVENTS
        for check in checks
        if check.name == f"all options: {event}" and check.figures
    ]


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
