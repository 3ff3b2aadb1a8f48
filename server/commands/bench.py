"""`slipstream bench KIND`: benchmarks. Each kind is a module with the interface of a command."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

SUMMARY = "measure decode speed, latency under load, or draft acceptance"
_KINDS = {
    name: f"..bench.{module}"
    for name, module in (
        ("acceptance", "acceptance_command"),
        ("compare", "compare_command"),
        ("offline", "offline_command"),
        ("serve", "serve_command"),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, path in _KINDS.items():
        module: Any = importlib.import_module(path, __package__)
        kind = kinds.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False
        )
        module.add_arguments(kind)
        kind.set_defaults(run_kind=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.run_kind(args))
