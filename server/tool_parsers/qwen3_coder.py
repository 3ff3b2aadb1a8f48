"""Parses Qwen3-Coder's calls: `<function=name><parameter=key>value</parameter></function>`.

Values are unquoted; the tool's schema decides which are strings and which are JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..json_text import json_text, read_json
from .base import ToolParser, Wait

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderToolParser(ToolParser):
    """Parses calls between tags anywhere in the text; string arguments stream."""

    special_tokens = (BEGIN, END)

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        functions = [tool.get("function") or tool for tool in tools or []]
        self._schemas = {f["name"]: (f.get("parameters") or {}) for f in functions}
        super().__init__(tools, new_id)

    def run(self) -> Wait[None]:
        while raw := (yield from self.take_until([BEGIN, FUNCTION], self.content)):
            if raw == BEGIN:
                raw += yield from self.take_space()
                marker = yield from self.take_any([FUNCTION])
                raw += marker
                if not marker:
                    self.content(raw)
                    continue
            name, closed = yield from self.take_through(lambda char: char in ">\n")
            if not closed or not name[:-1].strip() or name[-1] != ">":
                self.content(raw + name)
                continue
            self.start_call(name[:-1].strip())
            yield from self._arguments(name[:-1].strip())
            if raw.startswith(BEGIN):
                yield from self.take_end(END)

    def _arguments(self, function: str) -> Wait[None]:
        """Read the parameters up to the function's end, or to text that is not a parameter."""
        schema, lead = self._schemas.get(function, {}), "{"
        space = yield from self.take_space()
        marker = yield from self.take_any([PARAMETER, FUNCTION_END])
        while marker == PARAMETER:
            key, closed = yield from self.take_through(lambda char: char == ">")
            if not closed:
                self.arguments(lead)
                return
            self.arguments(lead + json.dumps(key[:-1].strip(), ensure_ascii=False) + ": ")
            lead = ", "
            marker = yield from self._value(kinds_of(_property(schema, key[:-1].strip()), schema))
            if not marker:
                return  # the text ends inside the value
            if marker == PARAMETER_END:
                space = yield from self.take_space()
                marker = yield from self.take_any([PARAMETER, FUNCTION_END])
        self.arguments("{}" if lead == "{" else "}")
        if not marker:
            self.content(space)

    def _value(self, kinds: set[str]) -> Wait[str]:
        """Read one value, without a line feed at either end; returns the marker that ended it."""
        if (yield from self.peek()) == "\n":
            self.take(1)
        ends = [PARAMETER_END, PARAMETER, FUNCTION_END]
        if kinds <= {"string"}:
            return (yield from self._text(ends))
        pieces: list[str] = []
        marker = yield from self.take_until(ends, pieces.append)
        if marker:
            self.arguments(as_json("".join(pieces).removesuffix("\n"), kinds))
        return marker

    def _text(self, ends: Sequence[str]) -> Wait[str]:
        held = ""

        def sink(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            self.arguments(_escaped(text.removesuffix("\n")))

        self.arguments('"')
        marker = yield from self.take_until(ends, sink)
        if marker:
            self.arguments('"')
        return marker


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say.

    `root` resolves references to `#/$defs/`."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kinds: set[str] = set()
    named = schema.get("type")
    kinds |= {named} if isinstance(named, str) else set(named or ())
    for value in (*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())):
        if not named:
            kinds.add("string" if isinstance(value, str) else "number")
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= kinds_of(branch, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        target = (root.get("$defs") or {}).get(reference.removeprefix("#/$defs/"))
        kinds |= kinds_of(target, root, depth + 1)
    return kinds


def as_json(text: str, kinds: set[str]) -> str:
    """The JSON text of an unquoted value.

    It is a string if `kinds` allow one; otherwise what it means as JSON or as a Python literal, and
    a string if it means nothing."""
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return json.dumps(text, ensure_ascii=False)
    for read in (read_json, ast.literal_eval):
        try:
            value = read(text.strip())
            return json_text(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    lowered = text.strip().lower()
    return lowered if lowered in ("true", "false", "null") else json.dumps(text, ensure_ascii=False)
