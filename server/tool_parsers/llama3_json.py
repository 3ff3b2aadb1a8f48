"""`{"name": …, "parameters": {…}}` as the whole answer, maybe behind `<|python_tag|>`: Llama 3."""

from __future__ import annotations

from .base import Wait
from .json_call import JsonToolParser

TAG = "<|python_tag|>"


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
                self.content(raw + (rest or ""))
                return
            self.content(rest or "")
            raw = yield from self.take_space()
            raw += yield from self.take_any([";"])
            raw += yield from self.take_space()
            raw += yield from self.take_any([TAG])
