"""Owns one choice's way from text to a message: content, reasoning, tool calls.

A parser turns the growing text into deltas; a whole message is the sum of the same deltas, so that
both ways of answering agree by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET

from ..openai_types.replies import CalledFunction, ChatMessage, Delta, ReplyToolCall
from ..tool_parsers.base import ContentDelta, Event, ReasoningDelta, ToolCallStart
from .output_parser import OutputParser


class MessageParser(Protocol):
    """Reads the text of one choice, in any pieces."""

    num_reasoning_tokens: int

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What these characters add to the message; `token_ids` came with them."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back, once the text has ended."""
        ...


class PlainText:
    """The text is the content."""

    num_reasoning_tokens = 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """The text as content."""
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is ever held back."""
        return []


class EventParser:
    """The events of a tool and reasoning parser as deltas."""

    def __init__(
        self, output: OutputParser, show_reasoning: bool, parallel: bool, legacy: bool = False
    ) -> None:
        """`legacy` tells calls as `function_call`, as OpenAI did before there were tools."""
        self.num_reasoning_tokens = 0
        self._output = output
        self._show_reasoning = show_reasoning
        self._parallel = parallel
        self._legacy = legacy
        self._num_tokens = 0
        self._reasoned = False  # reasoning has begun
        self._answered = False  # content or a call has begun

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """What the parser makes of these characters."""
        self._num_tokens += len(token_ids)
        return self._deltas(self._output.push(text)) if text else []

    def finish(self) -> list[Delta]:
        """What the parser held back."""
        return self._deltas(self._output.finish())

    def _deltas(self, events: list[Event]) -> list[Delta]:
        deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        if self._reasoned and not self._answered:
            self.num_reasoning_tokens = self._num_tokens
        return deltas

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, ReasoningDelta):
            self._reasoned = True
            return Delta(reasoning_content=event.text) if self._show_reasoning else None
        self._answered = True
        if isinstance(event, ContentDelta):
            return Delta(content=event.text)
        if event.index and not self._parallel:
            return None
        if isinstance(event, ToolCallStart):
            function = CalledFunction(event.name, "")
            call = ReplyToolCall(function, event.id, "function", event.index)
        else:
            function = CalledFunction(arguments=event.text)
            call = ReplyToolCall(function, index=event.index)
        if self._legacy:
            return Delta(function_call=function)
        return Delta(tool_calls=[call])


class MessageBuilder:
    """Adds deltas up to a message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ReplyToolCall] = {}
        self._function: CalledFunction | None = None

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return bool(self._calls) or self._function is not None

    def add(self, delta: Delta) -> None:
        """Add one delta."""
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning_content:
            self._reasoning.append(delta.reasoning_content)
        for part in delta.tool_calls or ():
            self._add_call(part)
        if delta.function_call is not None:
            self._function = self._function or CalledFunction("", "")
            _extend(self._function, delta.function_call)

    def _add_call(self, part: ReplyToolCall) -> None:
        index = part.index if isinstance(part.index, int) else len(self._calls)
        call = self._calls.setdefault(
            index, ReplyToolCall(CalledFunction("", ""), id="", type="function")
        )
        if isinstance(part.id, str):
            call.id = part.id
        _extend(call.function, part.function)

    def message(self) -> ChatMessage:
        """The message; `content` is null when there are only tool calls or reasoning."""
        content = "".join(self._content)
        empty = not content and (self.has_calls or self._reasoning)
        message = ChatMessage(None if empty else content)
        if self._reasoning:
            message.reasoning_content = "".join(self._reasoning)
        message.tool_calls = [self._calls[i] for i in sorted(self._calls)] or UNSET
        message.function_call = self._function or UNSET
        return message


def _extend(whole: CalledFunction, part: CalledFunction) -> None:
    for name in ("name", "arguments"):
        piece = getattr(part, name)
        if isinstance(piece, str):
            setattr(whole, name, getattr(whole, name) + piece)
