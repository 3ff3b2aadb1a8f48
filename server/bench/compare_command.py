"""`slipstream bench compare A B`: print the figures of two runs side by side, with their ratio.

It reads what `bench offline`, `bench serve` and `bench acceptance` write, and JSON lines with
`name`, `batch` and `decode_tok_s` that scripts around other engines print; it skips other lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ...configs.options import ConfigError
from .output import add_output, check_file, tables_to_stderr, write_figures

SUMMARY = "compare the figures of two runs: of offline, serve, acceptance, or another engine"
Runs = dict[str, dict[str, dict[str, float]]]  # run -> row -> figure -> value
_OFFLINE = ("decode_tok_s", "prefill_s", "step_ms")
_SERVE = ("request_throughput", "output_throughput", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="figures of the baseline")
    parser.add_argument("second", metavar="B", help="figures to compare; the ratio is B / A")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    check_file("--output", args.output)
    first, second = read(Path(args.first)), read(Path(args.second))
    rows = compare(first, second)
    if not rows:
        raise ConfigError(f"{args.first} and {args.second} have no figure in common")
    with tables_to_stderr(args.output):
        print(table(rows))
    write_figures(args.output, rows)
    return 0


def read(path: Path) -> Runs:
    """The figures in a file; raises ConfigError if it cannot be read or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or '').lower()}") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and whole.get("kind") == "offline":
        return {
            run["name"]: {f"batch {row['batch']}": _numbers(row) for row in run["results"]}
            for run in whole["runs"]
        }
    if isinstance(whole, dict) and whole.get("kind") == "serve":
        return {"serve": _serve(whole)}
    if isinstance(whole, dict) and whole.get("kind") == "acceptance":
        return {f"temperature {run['temperature']:g}": _domains(run) for run in whole["runs"]}
    runs = _lines(text)
    if not runs:
        raise ConfigError(f"{path} contains no benchmark figures")
    return runs


def _serve(whole: dict[str, Any]) -> dict[str, dict[str, float]]:
    rows = {}
    for name in _SERVE:
        value = whole.get(name)
        rows[name] = dict(value) if isinstance(value, dict) else {"value": value}
    return {name: _numbers(row) for name, row in rows.items()}


def _domains(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    rows = {f"domain {name}": figures for name, figures in run["domains"].items()}
    return {name: _numbers(row) for name, row in ({"all": run["all"]} | rows).items()}


def _lines(text: str) -> Runs:
    runs: Runs = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "batch" in entry and "decode_tok_s" in entry:
            rows = runs.setdefault(str(entry.get("name", "run")), {})
            rows[f"batch {entry['batch']}"] = _numbers(entry)
    return runs


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    kept = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "batch"}
    return {k: float(v) for k, v in kept.items()}


def compare(first: Runs, second: Runs) -> list[dict[str, Any]]:
    """One row for every figure that both files have, of offline runs only the main figures.

    Runs of the same name are compared. If no names agree, runs are paired in order. `ratio` is B's
    value over A's, or None if A's is 0.
    """
    names = [name for name in first if name in second]
    pairs = [(n, n) for n in names] or list(zip(first, second, strict=False))
    rows = []
    for name_a, name_b in pairs:
        for row, values in first[name_a].items():
            others = second[name_b].get(row, {})
            shown = _OFFLINE if row.startswith("batch") else tuple(values)
            for figure in (f for f in shown if f in values and f in others):
                a, b = values[figure], others[figure]
                ratio = b / a if a else None
                found = {"runs": [name_a, name_b], "row": row, "figure": figure}
                rows.append(found | {"a": a, "b": b, "ratio": ratio})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':28} {'figure':>16} {'A':>14} {'B':>14} {'B / A':>8}"]
    for row in rows:
        name = f"{' | '.join(dict.fromkeys(row['runs']))}, {row['row']}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(
            f"{name:28} {row['figure']:>16} {row['a']:>14,.3f} {row['b']:>14,.3f} {ratio:>8}"
        )
    return "\n".join(lines)
