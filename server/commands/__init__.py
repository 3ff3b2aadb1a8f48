"""The command line `slipstream COMMAND`; each command is one file of this folder.

A command's file defines SUMMARY, `add_arguments(parser)` and `run(args)`, which returns the exit
status. At its top it imports only the standard library and `configs`, so that `--help` is fast.
Adding a file here adds a command.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, cast

from ..version import version

_INTERRUPTED = 130  # exit status after Ctrl-C


class Command(Protocol):
    """The names that a command's file defines."""

    SUMMARY: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one sentence, without the long usage text."""

    def error(self, message: str) -> NoReturn:
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if match:
            message = self._unknown(match[1])
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _unknown(self, argument: str) -> str:
        from ...configs.options import did_you_mean

        known = [flag for action in _actions(self) for flag in action.option_strings]
        if argument.startswith("-"):
            flag = argument.partition("=")[0]
            return f"unknown flag {flag}{did_you_mean(flag, known)}"
        hint = did_you_mean(f"--{argument}", known)
        return f"unexpected argument {argument!r}{hint}"


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All actions of a parser and of its subparsers."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _actions(command)
    return found


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(f"slipstream {version()}")
        parser.exit(0)


def command_names() -> list[str]:
    """The names of all commands, sorted: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f".{name}", __package__))


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of the command `only`, so that no other file is imported."""
    parser = _Parser(
        prog="slipstream",
        description="An OpenAI-compatible LLM inference server built for speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in [only] if only else command_names():
        module = _load(name)
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status (2 for a wrong command line, 130 for Ctrl-C).

    Without `argv` this is the console script: it reads sys.argv, and ensures that Ctrl-C prints no
    traceback even while Python shuts down.
    """
    is_program = argv is None
    try:
        if is_program:
            # Registered first, so it runs last. After it, Python only frees memory.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        if is_program:  # threads may still be finishing their work
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))


def _run(argv: Sequence[str]) -> int:
    from ...configs.options import ConfigError  # imported late, so that `main` starts at once

    arguments = list(argv)
    if not arguments:
        build_parser().print_help()
        return 0
    only = arguments[0] if arguments[0] in command_names() else None
    args = build_parser(only).parse_args(arguments)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"slipstream {args.command}: error: {error}", file=sys.stderr)
        return 2
