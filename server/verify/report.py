"""What `slipstream verify` found: checks with their verdicts, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FALSE_ALARM = 1e-3  # chance that a sound server fails any statistical test of a report
NULL_HYPOTHESIS = (
    "drafts do not change what is sampled: with and without them, each token has the distribution "
    "that the model and the options define, up to the rounding measured here"
)
_MARKS = {"pass": "ok", "fail": "FAIL", "note": "note", "skip": "-"}
_NAME_WIDTH = 30


@dataclass(frozen=True)
class Check:
    """The verdict of one check."""

    group: str
    name: str
    status: str  # "pass", "fail", "note" (worth reading, not a failure) or "skip"
    summary: str  # one sentence
    figures: dict[str, Any] = field(default_factory=dict)  # for JSON and plots


@dataclass
class Report:
    """All checks of a run."""

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
    """A difference of log probabilities, for people."""
    return f"{value:.2g} nats"


def percent(value: float) -> str:
    """A share, for people."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"
