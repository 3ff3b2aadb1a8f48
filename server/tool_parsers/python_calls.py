"""Parses tool calls written as Python, such as `f(a=1)`, without executing anything."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from ..json_text import json_text


def parse_calls(
    text: str, known: Mapping[str, Sequence[str]] | None
) -> list[tuple[str, str]] | None:
    """The (name, JSON arguments) of each call in a Python list, or of calls on separate lines.

    `known` maps the accepted function names to their parameters in order, for positional arguments;
    None accepts any name. Returns None if the text has another form.
    """
    try:
        tree = ast.parse(text.strip())
        calls = [call for statement in tree.body for call in _calls(statement)]
        return [_convert(call, known) for call in calls] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _calls(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("not an expression")
    return statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]


def _convert(call: ast.expr, known: Mapping[str, Sequence[str]] | None) -> tuple[str, str]:
    if not isinstance(call, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(call.func)
    inner = call.args[0] if name == "print" and len(call.args) == 1 else None
    if inner is not None and not (known and name in known):
        return _convert(inner, known)  # Gemma wraps its calls in print()
    if not all(part.isidentifier() for part in name.split(".")) or (known and name not in known):
        raise ValueError("no such function")
    order = known[name] if known else []
    if len(call.args) > len(order):
        raise ValueError("positional arguments without names")
    arguments: dict[str, Any] = dict(zip(order, map(_literal, call.args), strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument without its own name")
        arguments[keyword.arg] = _literal(keyword.value)
    return name, json_text(arguments)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal, or of JSON's true, false or null; raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is not a string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


class CodeCounter:
    """Tracks brackets and strings in Python text, to find where a list of calls ends."""

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""
        self._escaped = False

    def closes(self, char: str) -> bool:
        """Read one character; returns whether it closes the outermost bracket."""
        if self._quote:
            if char == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
            return False
        if char in "'\"":
            self._quote = char
        elif char in "([{":
            self.depth += 1
        elif char in ")]}":
            self.depth -= 1
            return self.depth == 0
        return False
