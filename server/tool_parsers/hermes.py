"""Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

from .base import Wait
from .json_call import JsonToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser(JsonToolParser):
    """Parses calls between tags anywhere in the text."""

    special_tokens = (BEGIN, END)

    def run(self) -> Wait[None]:
        while (yield from self.take_until([BEGIN], self.content)):
            raw = BEGIN + (yield from self.take_space())
            before = self.num_calls
            rest = yield from self.json_call(end=[END])
            started = self.num_calls > before
            if rest is not None:
                self.content(rest if started else raw + rest)
            if started:
                yield from self.take_end(END)
