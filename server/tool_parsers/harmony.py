"""Parses harmony, gpt-oss's format: messages with a header, each in a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The channel `analysis` holds reasoning, `final` the answer, and `commentary` text for the user too,
or, with the recipient `functions.NAME`, the arguments of a call, which ends with <|call|>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .base import ContentDelta, Event, ReasoningDelta, ToolParser, Wait

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANSWER = f"{CHANNEL}final{MESSAGE}"  # the header of an answer
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_FUNCTIONS = "functions."
_NEXT_MESSAGE = "\n\n"  # between two messages of reasoning, or two for the user


class HarmonyToolParser(ToolParser):
    """Splits a whole output into reasoning, calls and text for the user.

    `prompt` is the rendered chat; its end shows in which header or message the output starts. Calls
    are only recognised if the request has tools; calls of the model's own tools are reasoning.
    """

    reads_reasoning = True
    end_tokens = (CALL, RETURN)
    special_tokens = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
        prompt: str = "",
    ) -> None:
        self._first = prompt.rpartition(START)[2] if START in prompt else ""
        self._shown: type[Event] | None = None  # the kind of text that was emitted last
        self._begins = False  # the next text is the first of its message
        self._is_empty = True  # the call has no arguments so far
        super().__init__(tools, new_id)

    @classmethod
    def answer_header(cls, prompt: str) -> str:
        return ANSWER if prompt.endswith(f"{START}assistant") else ""

    def run(self) -> Wait[None]:
        header, is_message, body = self._first.partition(MESSAGE)
        if is_message and any(end in body for end in (END, CALL, RETURN)):
            header, is_message = "", ""  # the prompt ends after a message
        if not is_message:
            if not self._first or header.strip() == "assistant":
                started = yield from self._starts_with_a_header()
                if not started:
                    yield from self._body(ANSWER)
            header += yield from self._header()
        while header:
            yield from self._body(header)
            header = yield from self._header()

    def _starts_with_a_header(self) -> Wait[bool]:
        """Whether the output continues a header. If not, the model does not write harmony."""
        space = yield from self.take_space()
        found = yield from self.take_any([START, CHANNEL, MESSAGE, CONSTRAIN, "to="])
        self._buffer = space + found + self._buffer
        return bool(found)

    def _header(self) -> Wait[str]:
        """Read up to the next body and return its header; "" if there is none."""
        while True:
            pieces: list[str] = []
            marker = yield from self.take_until([MESSAGE, START, END, CALL, RETURN], pieces.append)
            header = "".join(pieces)
            if marker == MESSAGE:
                return header or MESSAGE
            if not marker:
                return ""

    def _body(self, header: str) -> Wait[None]:
        """Emit a message's body as what its header says it is."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header.replace(CHANNEL, " "))
        name = self._function(recipient.group(1)) if recipient else None
        self._begins = True
        if name is not None:
            self.start_call(name)
            self._is_empty = True
            yield from self._until_end(self._argue)
            if self._is_empty:
                self.arguments("{}")
        elif recipient is not None and not recipient.group(1).startswith(_FUNCTIONS):
            yield from self._until_end(self._reason)
        elif channel is not None and channel.group(1) == "analysis":
            yield from self._until_end(self._reason)
        else:
            yield from self._until_end(self.content)

    def _function(self, recipient: str) -> str | None:
        """The function that a recipient names; None if the request has no such tools."""
        if self.known is None:
            return None
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS) or None
        return recipient if recipient in self.known else None

    def _until_end(self, sink: Callable[[str], None]) -> Wait[None]:
        """Pass the body on. A new header may follow without the marker of the body's end."""
        marker = yield from self.take_until([END, CALL, RETURN, START, CHANNEL], sink)
        if marker in (START, CHANNEL):
            self._buffer = marker + self._buffer

    def _argue(self, text: str) -> None:
        self._is_empty = self._is_empty and not text.strip()
        self.arguments(text)

    def _reason(self, text: str) -> None:
        self._show(ReasoningDelta, text)

    def content(self, text: str) -> None:
        """Emit text for the user, white space included."""
        self._show(ContentDelta, text)

    def _show(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if self._begins and self._shown is kind:
            text = _NEXT_MESSAGE + text
        self._begins, self._shown = False, kind
        self.emit(kind(text))
