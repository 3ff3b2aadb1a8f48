"""Splits model output into events: first reasoning, then tool calls in the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..tool_parsers.base import ContentDelta, Event, ParsedOutput, ToolParser
from .reasoning import ReasoningParser


class TokenIds(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary, or None."""
        ...


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

    def kept_ids(self, tokenizer: TokenIds) -> frozenset[int]:
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
