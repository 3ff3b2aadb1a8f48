"""What `slipstream verify` found: checks with their verdicts, as a table, as JSON and as HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2

FALSE_ALARM = 1e-3  # chance that a sound server fails any statistical test of a report
NULL_HYPOTHESIS = (
    "drafts do not change what is sampled: with and without them, each token has the distribution "
    "that the model and the options define, up to the rounding measured here"
)
_MARKS = {"pass": "ok", "fail": "FAIL", "note": "note", "skip": "-"}
_NAME_WIDTH = 30
TOGETHER = "all options: "  # begins the names of checks of all sampling options together


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    status: str  # "pass", "fail", "note" (worth reading, not a failure) or "skip"
    summary: str  # one sentence
    figures: dict[str, Any] = field(default_factory=dict)  # for JSON and plots


@dataclass
class Report:
    setup: dict[str, Any]
    checks: list[Check] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def add(self, group: str, name: str, ok: bool, summary: str, **figures: Any) -> None:
        self.checks.append(Check(group, name, "pass" if ok else "fail", summary, figures))

    def note(self, group: str, name: str, summary: str, **figures: Any) -> None:
        """Add a finding that is not a failure."""
        self.checks.append(Check(group, name, "note", summary, figures))

    def skip(self, group: str, name: str, why: str) -> None:
        self.checks.append(Check(group, name, "skip", why))

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "verify",
            "passes": self.passes,
            "null_hypothesis": NULL_HYPOTHESIS,
            "false_alarm": FALSE_ALARM,
            "setup": self.setup,
            "checks": [asdict(check) for check in self.checks],
        }

    def groups(self) -> dict[str, list[Check]]:
        """The checks by group, in the order in which the groups began."""
        found: dict[str, list[Check]] = {}
        for check in self.checks:
            found.setdefault(check.group, []).append(check)
        return found

    def table(self) -> str:
        """The checks as text, one a line, in groups, and the verdict."""
        lines: list[str] = []
        for group, checks in self.groups().items():
            lines += ["", group]
            lines += [
                f"  {_MARKS[check.status]:4} {check.name:{_NAME_WIDTH}} {check.summary}"
                for check in checks
            ]
        return "\n".join([*lines[1:], "", self.verdict()])

    def verdict(self) -> str:
        """The result as a sentence or two."""
        failed = [check for check in self.checks if check.status == "fail"]
        if failed:
            names = ", ".join(f"{check.group}: {check.name}" for check in failed)
            return f"{len(failed)} of {len(self.checks)} checks failed ({names})."
        return (
            f"No check failed. A sound server fails a statistical test in at most one of "
            f"{1 / FALSE_ALARM:,.0f} runs."
        )


def nats(value: float) -> str:
    return f"{value:.2g} nats"


def percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


@dataclass(frozen=True)
class Row:
    """A bar from zero, with a tick for what it is compared with."""

    name: str
    value: float
    label: str  # the value for people
    limit: float | None = None
    is_bad: bool = False


@dataclass(frozen=True)
class Bars:
    title: str
    rows: list[Row]

    @property
    def top(self) -> float:
        """The end of the axis: 1 for shares without limits."""
        if all(row.limit is None for row in self.rows):
            return 1.0
        return max(max(row.value, row.limit or 0.0) for row in self.rows) or 1.0


def page(report: Report) -> str:
    """The report as one HTML file."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True)
    return templates.get_template("report.html").render(
        report=report,
        model=report.setup.get("model", report.setup.get("url", "")),
        plots=_plots,
        null_hypothesis=NULL_HYPOTHESIS,
        false_alarm=FALSE_ALARM,
    )


def _plots(checks: list[Check]) -> Iterator[Bars]:
    """The plots that the figures of these checks allow."""
    distances, biases = [], []
    for check in checks:
        figures = check.figures
        if shares := figures.get("acceptance"):
            rows = [Row(f"draft {n + 1}", s, percent(s)) for n, s in enumerate(shares)]
            yield Bars(f"Accepted drafts by position, {check.name}", rows)
        if two := figures.get("token 1"):
            found, bound = two["total_variation"], two["bound"]
            name = f"{check.name}, token 1"
            distances.append(Row(name, found, f"{found:.3f}", bound, found > bound))
        if check.name.startswith(TOGETHER) and figures:
            size, limit = abs(figures["bias"]), figures["detectable_bias"]
            event = check.name.removeprefix(TOGETHER)
            biases.append(Row(event, size, percent(size), limit, check.status == "fail"))
    if distances:
        title = "Total variation between replies with drafts and without; the tick: chance"
        yield Bars(title, distances)
    if biases:
        title = "Bias of how often an event happened; the tick: the least that is surely found"
        yield Bars(title, biases)
