"""Parses DeepSeek's calls: between special tokens in V3 and R1 (fenced JSON) and V3.1 (bare JSON),
and in the markup DSML of V3.2 and V4."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..json_text import json_text, read_json
from .base import ToolParser, Wait
from .json_call import JsonToolParser

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

DSML = "｜DSML｜"
BLOCKS = {f"<{DSML}{name}>": f"</{DSML}{name}>" for name in ("tool_calls", "function_calls")}
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"


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


class DsmlToolParser(ToolParser):
    """Parses blocks of `invoke` elements with `parameter` elements; string arguments stream.

    The model says of each parameter whether it is a string; other values are JSON.
    """

    special_tokens = (DSML,)

    def run(self) -> Wait[None]:
        """As in the base class."""
        while raw := (yield from self.take_until([*BLOCKS, INVOKE], self.content)):
            end = BLOCKS.get(raw)
            if end is not None:
                raw += yield from self.take_space()
                raw += yield from self.take_any([INVOKE])
            while raw.endswith(INVOKE):
                name, closed = yield from self.take_through(lambda char: char in '"\n')
                bracket = (yield from self.take_any([">"])) if closed else ""
                raw += name + bracket
                if not bracket or len(name) < 2 or name[-1] != '"':
                    break
                self.start_call(name[:-1])
                yield from self._arguments()
                raw = yield from self.take_space()
                if end is not None and (yield from self.take_any([end])):
                    raw = ""
                    break
                raw += yield from self.take_any([INVOKE])
            self.content(raw)

    def _arguments(self) -> Wait[None]:
        """Read the parameters up to the call's end, or to text that is not a parameter."""
        lead = "{"
        space = yield from self.take_space()
        marker = yield from self.take_any([PARAMETER, INVOKE_END])
        while marker == PARAMETER:
            key, _ = yield from self.take_through(lambda char: char == '"')
            about, closed = yield from self.take_through(lambda char: char == ">")
            if not closed:
                self.arguments(lead)
                return
            self.arguments(f"{lead}{json.dumps(key[:-1], ensure_ascii=False)}: ")
            lead = ", "
            marker = yield from self._value('string="false"' not in about)
            if not marker:
                return  # the text ends inside the value
            if marker == PARAMETER_END:
                space = yield from self.take_space()
                marker = yield from self.take_any([PARAMETER, INVOKE_END])
        self.arguments("{}" if lead == "{" else "}")
        if not marker:
            self.content(space)

    def _value(self, is_string: bool) -> Wait[str]:
        """Read one value; returns the marker that ended it."""
        ends: Sequence[str] = (PARAMETER_END, PARAMETER, INVOKE_END)
        if is_string:
            self.arguments('"')
            marker = yield from self.take_until(ends, lambda text: self.arguments(_escaped(text)))
            if marker:
                self.arguments('"')
            return marker
        pieces: list[str] = []
        marker = yield from self.take_until(ends, pieces.append)
        if marker:
            self.arguments(_as_json("".join(pieces)))
        return marker


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """The value as JSON text; a string of it if it is not JSON."""
    try:
        return json_text(read_json(text.strip()))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
