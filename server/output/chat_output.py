"""Turns the text of one choice into a message: content, reasoning, tool calls.

A parser converts the growing text to deltas. A whole message is the sum of the same deltas, so
whole replies and streams always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import UNSET

from ..openai_types.replies import CalledFunction, ChatMessage, Delta, ReplyToolCall
from ..text.tokenizer import Tokenizer
from ..tool_parsers.base import (
    ContentDelta,
    Event,
    ParsedOutput,
    ReasoningDelta,
    ToolCallStart,
    ToolParser,
)
from .reasoning import ReasoningParser


class MessageParser(Protocol):
    """Parses the text of one choice, which may arrive in pieces of any size."""

    num_reasoning_tokens: int

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas that `text` adds to the message; `token_ids` arrived with it."""

    def finish(self) -> list[Delta]:
        """The deltas that were held back; called at the end of the text."""


class PlainText:
    """The parser for output without tool calls and reasoning: all text is content."""

    num_reasoning_tokens = 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class EventParser:
    """Converts the events of a tool-call and reasoning parser to deltas."""

    def __init__(
        self, output: OutputParser, show_reasoning: bool, parallel: bool, legacy: bool = False
    ) -> None:
        """Without `parallel`, only the first call is reported; `legacy` uses `function_call`."""
        self.num_reasoning_tokens = 0
        self._output = output
        self._show_reasoning = show_reasoning
        self._parallel = parallel
        self._legacy = legacy
        self._num_tokens = 0
        self._reasoned = False  # whether reasoning has begun
        self._answered = False  # whether content or a call has begun

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        self._num_tokens += len(token_ids)
        return self._deltas(self._output.push(text)) if text else []

    def finish(self) -> list[Delta]:
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
    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ReplyToolCall] = {}
        self._function: CalledFunction | None = None

    @property
    def has_calls(self) -> bool:
        return bool(self._calls) or self._function is not None

    def add(self, delta: Delta) -> None:
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
        """The message. `content` is null if it has only tool calls or reasoning."""
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


class OutputParser:
    """Combines a reasoning parser and a tool-call parser; either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        events = self._reasoning.push(text) if self._reasoning else _content(text)
        return self._through_tools(events)

    def finish(self) -> list[Event]:
        """The events that were held back. Nothing may be pushed afterwards."""
        events = self._through_tools(self._reasoning.finish() if self._reasoning else [])
        return events + (self._tools.finish() if self._tools else [])

    def parse(self, text: str) -> ParsedOutput:
        """Parse a whole output; gives the same as its streamed events, joined."""
        return ParsedOutput().add(self.push(text)).add(self.finish())

    def kept_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The ids of special tokens that detokenization must keep for these parsers."""
        parsers = filter(None, (self._reasoning, self._tools))
        ids = (tokenizer.token_to_id(token) for p in parsers for token in p.special_tokens)
        return frozenset(index for index in ids if index is not None)

    def _through_tools(self, events: Iterable[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        out: list[Event] = []
        for event in events:
            out += self._tools.push(event.text) if isinstance(event, ContentDelta) else [event]
        return out


def _content(text: str) -> list[Event]:
    return [ContentDelta(text)] if text else []
