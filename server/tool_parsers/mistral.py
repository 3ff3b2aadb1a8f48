"""Parses Mistral's calls: `[TOOL_CALLS][{…}, {…}]` and the newer `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import random
import string

from .base import Wait
from .json_call import JsonToolParser

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class MistralToolParser(JsonToolParser):
    """Parses calls after a marker, up to the end of the list or of the arguments."""

    special_tokens = (BEGIN, ARGS, CALL_ID)

    @staticmethod
    def make_id() -> str:
        """A new id of nine letters and digits, the only form that Mistral's templates accept."""
        return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))

    def run(self) -> Wait[None]:
        while (yield from self.take_until([BEGIN], self.content)):
            raw = BEGIN + (yield from self.take_space())
            before = self.num_calls
            first = yield from self.peek()
            if first == "[":
                rest = yield from self.json_calls()
            elif first == "{":
                rest = yield from self.json_call()
            else:
                rest = yield from self._named_call()
            if rest is not None:
                self.content(rest if self.num_calls > before else raw + rest)

    def _named_call(self) -> Wait[str | None]:
        name = yield from self._word()
        raw = name + (yield from self.take_space())
        call_id = ""
        marker = yield from self.take_any([CALL_ID, ARGS])
        raw += marker
        if marker == CALL_ID:
            call_id = yield from self._word()
            raw += call_id + (yield from self.take_any([ARGS]))
        raw += yield from self.take_space()
        if not name or (yield from self.peek()) != "{":
            return raw
        self.start_call(name, call_id or None)
        yield from self.json_object(self.arguments)
        return None

    def _word(self) -> Wait[str]:
        word = ""
        while (yield from self.peek()) in _NAME:
            word += self.take(1)
        return word
