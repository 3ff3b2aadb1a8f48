"""Parses JSON tool calls, such as `{"name": "f", "arguments": {…}}`, while they are generated.

As soon as a call's name is known, its arguments are emitted exactly as the model wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..json_text import encodable
from .base import ToolParser, Wait

_ARGUMENTS = ("arguments", "parameters", "args")
_OTHER = ("id", "type")


@dataclass
class _Call:
    """The state of a call that is being read."""

    name: str | None = None
    held: str | None = None  # arguments that preceded the name
    started: bool = False
    raw: str = ""  # text that was read and is not part of a started call


class _StringEnd:
    """Called with each character of a JSON string, returns True for its closing quote."""

    def __init__(self) -> None:
        self._open = self._escaped = False

    def __call__(self, char: str) -> bool:
        if char == '"' and not self._escaped:
            if self._open:
                return True
            self._open = True
        self._escaped = char == "\\" and not self._escaped
        return False


class JsonToolParser(ToolParser):
    """Base class of the parsers of formats that are built on JSON."""

    def json_call(self, end: Sequence[str] = (), needs_arguments: bool = False) -> Wait[str | None]:
        """Read one call object and emit its events.

        Returns None if it was a call; otherwise the text that was read and not emitted, which may
        also be text that breaks the object after well-formed arguments. A marker in `end` ends the
        call even inside its arguments, unless it is in a string.
        """
        call = _Call()
        if (yield from self.peek()) != "{":
            return ""
        call.raw += self.take(1)
        while True:
            call.raw += yield from self.take_space()
            key = yield from self._string(call)
            if key is None or key not in ("name", *_ARGUMENTS, *_OTHER):
                return call.raw
            call.raw += yield from self.take_space()
            if (yield from self.peek()) != ":":
                return call.raw
            call.raw += self.take(1) + (yield from self.take_space())
            if not (yield from self._member(call, key, end)):
                return None if call.started and not call.raw else call.raw
            call.raw += yield from self.take_space()
            separator = yield from self.peek()
            if separator == "," or separator == "}":
                call.raw += self.take(1)
            if separator == "}":
                return self._close(call, needs_arguments)
            if separator != ",":
                return call.raw if call.raw.strip() else None

    def _close(self, call: _Call, needs_arguments: bool) -> str | None:
        if call.started:
            return None
        if call.name is None or (call.held is None and needs_arguments):
            return call.raw
        self._start(call)
        self.arguments(call.held or "{}")
        return None

    def _start(self, call: _Call) -> None:
        assert call.name is not None
        self.start_call(call.name)
        call.started, call.raw = True, ""

    def _member(self, call: _Call, key: str, end: Sequence[str]) -> Wait[bool]:
        """Read the value of one member; returns False if the object is broken there."""
        if key == "name":
            name = yield from self._string(call)
            if not name or call.name is not None or not self.accepts(name):
                return False
            call.name = name
            if call.held is not None:
                self._start(call)
                self.arguments(call.held)
            return True
        if key in _OTHER:
            return (yield from self._string(call)) is not None
        if call.started or call.held is not None:
            return False
        return (yield from self._arguments(call, end))

    def _arguments(self, call: _Call, end: Sequence[str]) -> Wait[bool]:
        char = yield from self.peek()
        if char == "{" and call.name is not None:
            self._start(call)
            return (yield from self.json_object(self.arguments, end))
        if char == "{":
            pieces: list[str] = []
            whole = yield from self.json_object(pieces.append, end)
            call.raw += "".join(pieces)
            call.held = "".join(pieces)
            return whole
        if char == '"':  # some models write the arguments as a string of JSON text
            text = yield from self._string(call)
            if text is None:
                return False
            call.held = text
        elif (yield from self.take_any(["null"])):
            call.raw += "null"
            call.held = "{}"
        else:
            return False
        if call.name is not None:
            self._start(call)
            self.arguments(call.held)
        return True

    def accepts(self, name: str) -> bool:
        """Whether a function name is accepted; formats with unambiguous markers accept any."""
        return True

    def _string(self, call: _Call) -> Wait[str | None]:
        """Read a JSON string and add its text to `call.raw`.

        Returns its value, or None if it is not a complete JSON string."""
        if (yield from self.peek()) != '"':
            return None
        text, closed = yield from self.take_through(_StringEnd())
        call.raw += text
        if not closed:
            return None
        try:
            return encodable(str(json.loads(text)))
        except ValueError:
            return None

    def json_object(self, sink: Callable[[str], None], end: Sequence[str] = ()) -> Wait[bool]:
        """Pass the text of the next JSON object to `sink`, in pieces, while it is generated.

        Returns False if the text ends, or a marker in `end` appears, before the object is closed.
        """
        depth, in_string, escaped = 0, False, False
        while (yield from self.peek()):
            done = len(self._buffer)
            for offset, char in enumerate(self._buffer):
                if in_string:
                    in_string = escaped or char != '"'
                    escaped = not escaped and char == "\\"
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if not depth:
                        sink(self.take(offset + 1))
                        return True
                elif any(char == marker[0] for marker in end):
                    done = offset
                    break
            sink(self.take(done))
            if self._buffer:  # at a character that may start an end marker
                if (yield from self._at(end)):
                    return False
                sink(self.take(1))
        return False

    def _at(self, markers: Sequence[str]) -> Wait[bool]:
        """Whether the text continues with a marker; the marker is not consumed."""
        while True:
            if any(self._buffer.startswith(marker) for marker in markers):
                return True
            if not any(marker.startswith(self._buffer) for marker in markers):
                return False
            if not (yield from self.more()):
                return False

    def json_calls(self) -> Wait[str | None]:
        """Read a list of call objects.

        Returns None if all were calls, otherwise the text that was read and is not a call."""
        raw = self.take(1)  # the opening bracket
        while True:
            raw += yield from self.take_space()
            rest = yield from self.json_call()
            if rest is not None:
                return raw + rest
            raw = yield from self.take_space()
            separator = yield from self.take_any([",", "]"])
            if separator != ",":
                return None
            raw += separator
