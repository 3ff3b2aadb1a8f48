"""`{"name": …, "parameters": {…}}` as the whole answer, maybe behind `<|python_tag|>`: Llama 3.

Also the tools that Llama 3 knows by itself: `<|python_tag|>brave_search.call(query="…")`, and code
behind the tag where the request has a tool that runs it.
"""

from __future__ import annotations

import json

from .base import Wait
from .json_call import JsonToolParser
from .python_calls import CodeCounter, parse_calls

TAG = "<|python_tag|>"
CODE_TOOLS = ("code_interpreter", "ipython", "python")


class Llama3JsonToolParser(JsonToolParser):
    """Bare JSON calls at the start, or behind the tag; several are separated by a semicolon."""

    special_tokens = (TAG,)

    def accepts(self, name: str) -> bool:
        """Bare JSON may be an ordinary answer: only the request's tools count."""
        return self.is_known(name)

    def run(self) -> Wait[None]:
        """See the base."""
        raw = yield from self.take_space()
        raw += yield from self.take_any([TAG])
        while True:
            yield from self._calls(raw)
            raw = yield from self.take_until([TAG], self.content)
            if not raw:
                return

    def _calls(self, raw: str) -> Wait[None]:
        """Calls one after the other; `raw` is the text before the first, if it is none."""
        while True:
            raw += yield from self.take_space()
            before = self.num_calls
            rest = yield from self.json_call(needs_arguments=True)
            if self.num_calls == before:
                if raw.strip() == TAG and not rest:
                    yield from self._built_in(raw)
                else:
                    self.content(raw + (rest or ""))
                return
            self.content(rest or "")
            raw = yield from self.take_space()
            raw += yield from self.take_any([";"])
            raw += yield from self.take_space()
            raw += yield from self.take_any([TAG])

    def _built_in(self, raw: str) -> Wait[None]:
        """What follows the tag and is no JSON: `name.call(…)`, or code."""
        code_tool = next((name for name in CODE_TOOLS if name in (self.known or ())), None)
        counter, head = CodeCounter(), ""

        def ends(char: str) -> bool:
            nonlocal head
            if "(" not in head:
                head += char
            return counter.closes(char) or not _may_be_call(head)

        text = (yield from self.take_through(ends))[0]
        known = None if self.known is None else {f"{n}.call": k for n, k in self.known.items()}
        calls = parse_calls(text, known) if text.endswith(")") and _may_be_call(head) else None
        if calls:
            ((name, arguments),) = calls
            self.start_call(name.removesuffix(".call"))
            self.arguments(arguments)
        elif code_tool is not None:
            pieces = [text]
            yield from self.take_until([TAG], pieces.append)
            self.start_call(code_tool)
            self.arguments(json.dumps({"code": "".join(pieces)}, ensure_ascii=False))
        else:
            self.content(raw + text)


def _may_be_call(head: str) -> bool:
    """Whether this can begin `name.call(`."""
    name, bracket, _ = head.partition("(")
    first, dot, rest = name.partition(".")
    if bracket:
        return first.isidentifier() and rest == "call"
    return (not first or first.isidentifier()) and (not dot or "call".startswith(rest))
