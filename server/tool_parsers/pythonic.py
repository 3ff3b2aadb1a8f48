"""Parses `[f(a=1), g()]` at the start of a reply, as Llama 3.2 and 4 write calls."""

from __future__ import annotations

from .base import ToolParser, Wait
from .python_calls import CodeCounter, parse_calls

START, STOP = "<|python_start|>", "<|python_end|>"


class PythonicToolParser(ToolParser):
    """Parses a Python list of calls at the start; emits them when the list is complete."""

    special_tokens = (START, STOP)

    def run(self) -> Wait[None]:
        raw = yield from self.take_space()
        raw += yield from self.take_any([START])
        raw += yield from self.take_space()
        text = yield from self._list()
        calls = parse_calls(text, self.known) if text.endswith("]") else None
        if calls is None:
            self.content(raw + text)
            return
        for name, arguments in calls:
            self.start_call(name)
            self.arguments(arguments)
        yield from self.take_end(STOP)

    def _list(self) -> Wait[str]:
        """Consume the text from "[" to the matching "]", or as far as it can be a list of calls."""
        if (yield from self.peek()) != "[":
            return ""
        counter, head = CodeCounter(), ""

        def ends(char: str) -> bool:
            nonlocal head
            if "(" not in head:  # only a name may precede the first bracket
                head += char
            return counter.closes(char) or not _may_be_call(head)

        return (yield from self.take_through(ends))[0]


def _may_be_call(head: str) -> bool:
    """Whether `head`, which starts with `[`, can be the start of a list of calls."""
    name = head[1:].partition("(")[0].strip()
    return not name or all(part.isidentifier() or not part for part in name.split("."))
