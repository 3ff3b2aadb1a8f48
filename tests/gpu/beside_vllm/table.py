"""Prints ours beside vLLM's from the lines that `lane.py` wrote: table.py FILE.jsonl ...

A row for each figure: the mean of the runs of both sides, their ratio (above 1: ours is better,
also for times), and the goal. Rows that miss their goal have a star. Failures come last.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Key = tuple[str, ...]  # item, then server and figure, or batch size
# The ratios that issues ask for, by the beginning of a row's name.
GOALS = {
    "lognormal, 4 x 64 off": 1.15, "lognormal, 4 x 64 eagle3": 1.2,
    "lognormal, 32 at once": 1.25, "prompts of 3,000": 1.05, "shared prefix": 1.15,
    "open loop": 1.0, "qwen3": 1.15, "gpt-oss": 1.15, "llama-8b-fp8+eagle3": 1.25,
    "llama-8b-fp8": 1.2, "llama-8b-int4": 1.2, "llama-8b-tp2": 1.2, "llama-70b-tp2": 1.2,
}  # fmt: skip


def key_of(line: dict[str, Any]) -> Key:
    """What a line measures, without its side and run."""
    if "batch" in line:
        return line["item"], str(line["batch"])
    return line["item"], line["server"], line["figure"]


def rows(lines: Iterable[dict[str, Any]]) -> dict[Key, dict[str, list[float]]]:
    """The values of each side, in the order in which the lines came."""
    found: dict[Key, dict[str, list[float]]] = {}
    for line in lines:
        if line.get("value") is not None:
            sides = found.setdefault(key_of(line), {"ours": [], "vllm": []})
            sides[line["side"]].append(float(line["value"]))
    return found


def goal_of(name: str) -> float | None:
    fitting = [goal for start, goal in GOALS.items() if name.startswith(start)]
    return fitting[0] if fitting else None


def ratio_of(key: Key, ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How much better the mean of ours is; figures in milliseconds are better if smaller."""
    ratio = statistics.fmean(ours) / statistics.fmean(theirs)
    return 1 / ratio if "_ms" in key[-1] else ratio


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The table, then a line for each failure and each report of `verify`."""
    shown = [f"{'':52} {'ours':>10} {'vLLM':>10} {'ratio':>6} {'goal':>5}"]
    for key, sides in rows(lines).items():
        name = " ".join(key)
        means = [f"{statistics.fmean(side):,.1f}" if side else "" for side in sides.values()]
        row = f"{name:52} {means[0]:>10} {means[1]:>10}"
        if sides["ours"] and sides["vllm"]:
            ratio, goal = ratio_of(key, sides["ours"], sides["vllm"]), goal_of(name)
            row += f" {ratio:6.3f}"
            if goal:
                row += f" {goal:5.2f}" + (" *" if ratio < goal else "")
        shown.append(row.rstrip())
    for line in lines:
        if "error" in line:
            item = line["items"] if "items" in line else line["item"]
            shown.append(f"failed, {line['side']}, {item}: {line['error'][:200]}")
        if "report" in line:
            verdict = "passed" if line.get("status") == 0 else "found differences"
            shown.append(f"verify, {line['servers']} servers: {verdict} (status {line['status']})")
    return "\n".join(shown)


def main() -> None:
    lines = []
    for name in sys.argv[1:]:
        for text in Path(name).read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                pass  # cut while it was written
    print(table(lines))


if __name__ == "__main__":
    main()
