"""Parses DeepSeek's calls between special tokens: V3 and R1 (fenced JSON), V3.1 (bare JSON)."""

from __future__ import annotations

from .base import Wait
from .json_call import JsonToolParser

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekToolParser(JsonToolParser):
    """Parses blocks of calls; a call is a header, a separator and JSON arguments."""

    special_tokens = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)

    def run(self) -> Wait[None]:
        """As in the base class."""
        while marker := (yield from self.take_until([CALLS, CALL], self.content)):
            raw = marker
            if marker == CALLS:
                raw += yield from self.take_space()
                raw += yield from self.take_any([CALL])
            yield from self._calls(raw)

    def _calls(self, raw: str) -> Wait[None]:
        """Parse the calls of a block; `raw` is the text so far, up to the first call's marker."""
        while raw.endswith(CALL):
            header: list[str] = []
            separator = yield from self.take_until([SEPARATOR, CALL_END], header.append)
            raw += "".join(header) + separator
            if separator != SEPARATOR:
                break
            body, name = yield from self._name("".join(header).strip())
            raw += body
            if not name or (yield from self.peek()) != "{":
                break
            self.start_call(name)
            whole = yield from self.json_object(self.arguments, [CALL_END])
            if whole:
                yield from self.take_end("```")
            yield from self.take_end(CALL_END)
            space = yield from self.take_space()
            if (yield from self.take_any([CALLS_END])):
                return
            raw = space + (yield from self.take_any([CALL]))
        self.content(raw)

    def _name(self, header: str) -> Wait[tuple[str, str]]:
        """Read what precedes the arguments; returns that text and the function's name."""
        if header != "function":
            return (yield from self.take_space()), header
        line: list[str] = []
        raw = yield from self.take_until(["\n"], line.append)
        name = "".join(line)
        raw = name + raw + (yield from self.take_space())
        raw += yield from self.take_any(["```json"])
        return raw + (yield from self.take_space()), name.strip()
