"""`[f(a=1), g()]` as the whole answer: Llama 3.2 and 4, and others."""

from __future__ import annotations

from .base import ToolParser, Wait
from .python_calls import CodeCounter, parse_calls

START, STOP = "<|python_start|>", "<|python_end|>"


class PythonicToolParser(ToolParser):
    """A Python list of calls at the start; its calls are emitted once the list is closed."""

    special_tokens = (START, STOP)

    def run(self) -> Wait[None]:
        """See the base."""
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
        """The text from "[" to its "]", or as far as it can be a list of calls."""
        if (yield from self.peek()) != "[":
            return ""
        counter, head = CodeCounter(), ""

        def ends(char: str) -> bool:
            nonlocal head
            if "(" not in head:  # before the first bracket there is only a name
                head += char
            return counter.closes(char) or not _may_be_call(head)

        return (yield from self.take_through(ends))[0]


def _may_be_call(head: str) -> bool:
    """Whether `[` and what follows can begin a list of calls."""
    name = head[1:].partition("(")[0].strip()
    return not name or all(part.isidentifier() or not part for part in name.split("."))
