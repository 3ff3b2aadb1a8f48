"""Parses calls of Gemma 4 and FunctionGemma (between special tokens) and Gemma 3 (JSON)."""

from __future__ import annotations

import json
import re
from typing import Any

from ..json_text import json_text, read_json
from .base import Wait
from .json_call import JsonToolParser
from .python_calls import parse_calls

_BLOCKS = {
    "<|tool_call>": "<tool_call|>",
    "<start_function_call>": "<end_function_call>",
    "```tool_code": "```",
    "```tool_call": "```",
}
_JSON_FENCE = "```json"
_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?={)")
_QUOTES = ('<|"|>', "<escape>")
_BARE = re.compile(r"[^,}\]]*")
_KEY = re.compile(r"\s*([^:{}\[\],]*?)\s*:\s*")
_SPACE = re.compile(r"\s*")


class GemmaToolParser(JsonToolParser):
    """Parses calls in Gemma's formats: JSON calls stream, others are emitted when complete."""

    special_tokens = ("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>") + (
        "<end_function_call>",
        "<escape>",
    )

    def accepts(self, name: str) -> bool:
        """Accept only the request's tools, because JSON may also be an ordinary answer."""
        return self.is_known(name)

    def run(self) -> Wait[None]:
        raw = yield from self.take_space()
        yield from self._json(raw)
        while marker := (yield from self.take_until([*_BLOCKS, _JSON_FENCE], self.content)):
            if marker == _JSON_FENCE:
                yield from self._json(marker + (yield from self.take_space()), fence=True)
            else:
                yield from self._block(marker)

    def _json(self, raw: str, fence: bool = False) -> Wait[None]:
        before = self.num_calls
        rest = yield from self.json_call(needs_arguments=True)
        if self.num_calls == before:
            self.content(raw + (rest or ""))
            return
        self.content(rest or "")
        if fence:
            yield from self.take_end("```")

    def _block(self, marker: str) -> Wait[None]:
        pieces: list[str] = []
        end = yield from self.take_until([_BLOCKS[marker]], pieces.append)
        body = "".join(pieces)
        calls = parse_block(body) or parse_calls(body, self.known)
        for name, arguments in calls or []:
            self.start_call(name)
            self.arguments(arguments)
        if calls is None:
            self.content(marker + body + end)


def parse_block(body: str) -> list[tuple[str, str]] | None:
    """The one (name, JSON arguments) in `call:name{key:value, …}`; None if `body` has another form.

    Raises nothing, however malformed the arguments are.
    """
    head = _HEAD.match(body)
    if head is None:
        return None
    try:
        arguments, end = _value(body, head.end())
        written = json_text(arguments)
    except (ValueError, RecursionError):
        return None
    if body[end:].strip():
        return None
    return [(head[1], written)]


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that starts at index `at`, and the index after it.

    It is an object, a list, a quoted string, a JSON number or word, or else bare text, which is a
    string. There may be no space before a bracket or a quote. Raises ValueError if the value is
    missing or malformed, and RecursionError if it is nested too deeply.
    """
    if text.startswith("{", at):
        return _object(text, at + 1)
    if text.startswith("[", at):
        return _list(text, at + 1)
    if (quoted := _quoted(text, at)) is not None:
        return quoted
    bare = _BARE.match(text, at)
    assert bare is not None
    word = bare[0].strip()
    if not word:
        raise ValueError("a value is missing")
    try:
        return read_json(word), bare.end()
    except ValueError:
        return word, bare.end()


def _quoted(text: str, at: int) -> tuple[str, int] | None:
    """The string that starts at `at`, and the index after it; None if no quote is there.

    Raises ValueError if the string does not end.
    """
    for quote in _QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith('"', at):
        value, end = json.JSONDecoder().raw_decode(text, at)
        return str(value), end
    return None


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """As `_value`, for an object; `at` is the index after its opening brace."""
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text.startswith("}", at) and not found:
            return found, at + 1
        quoted = _quoted(text, at)
        key_end = quoted[1] if quoted else at
        colon = _KEY.match(text, key_end)
        if colon is None or (not quoted and not colon[1]):
            raise ValueError("a key is missing")
        found[quoted[0] if quoted else colon[1]], at = _value(text, colon.end())
        at, closed = _separator(text, at, "}")
        if closed:
            return found, at


def _list(text: str, at: int) -> tuple[list[Any], int]:
    """As `_value`, for a list; `at` is the index after its opening bracket."""
    found: list[Any] = []
    while True:
        at = _skip(text, at)
        if text.startswith("]", at) and not found:
            return found, at + 1
        value, at = _value(text, at)
        found.append(value)
        at, closed = _separator(text, at, "]")
        if closed:
            return found, at


def _separator(text: str, at: int, close: str) -> tuple[int, bool]:
    """The index after the next comma or `close`, and whether it was `close`; else ValueError."""
    at = _skip(text, at)
    if text.startswith((",", close), at):
        return at + 1, text.startswith(close, at)
    raise ValueError(f"neither a comma nor {close}")


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()
