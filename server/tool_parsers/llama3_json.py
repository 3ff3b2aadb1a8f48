"""Parses Llama 3's JSON calls, which are the whole reply or follow `<|python_tag|>`.

It also parses calls of Llama 3's built-in tools, `<|python_tag|>brave_search.call(query="…")`, and
code after the tag if the request has a tool that runs code.
"""

from __future__ import annotations

import json

from .base import Wait
from .json_call import JsonToolParser
from .python_calls import CodeCounter, parse_calls

TAG = "<|python_tag|>"
CODE_TOOLS = ("code_interpreter", "ipython", "python")


class Llama3JsonToolParser(JsonToolParser):
    """Parses JSON calls at the start of the text or after the tag, separated by semicolons."""

    special_tokens = (TAG,)

    def accepts(self, name: str) -> bool:
        """Accept only the request's tools, because JSON may also be an ordinary answer."""
        return self.is_known(name)

    def run(self) -> Wait[None]:
        raw = yield from self.take_space()
        raw += yield from self.take_any([TAG])
        while True:
            yield from self._calls(raw)
            raw = yield from self.take_until([TAG], self.content)
            if not raw:
                return

    def _calls(self, raw: str) -> Wait[None]:
        """Parse consecutive calls until other text follows.

        `raw` is the space and the tag, if any, read before the first call. It is dropped if a
        call follows. If the tag is followed by text that does not begin like JSON, `_built_in`
        parses that. Otherwise `raw` is content.
        """
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
        """Parse what follows the tag and is not JSON: `name.call(…)`, or code."""
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
    """Whether `head` is a prefix of `name.call(…)`."""
    name, bracket, _ = head.partition("(")
    first, dot, rest = name.partition(".")
    if bracket:
        return first.isidentifier() and rest == "call"
    return (not first or first.isidentifier()) and (not dot or "call".startswith(rest))
