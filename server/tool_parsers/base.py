"""Defines the events of a parsed model output and the base class of the parsers that emit them.

A parser is one generator, `run`, which reads the text like a file and yields while it waits for
more. What it emits therefore depends only on the text, not on how the text was split into deltas.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]  # part of `run`: may yield to wait for text, returns T


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call starts; its arguments follow, then the next call or content."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """The next piece of a call's arguments; joined, the pieces are JSON text."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


@dataclass
class ToolCall:
    """A complete call; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedOutput:
    """All events of one output joined, for a response that is not streamed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> ParsedOutput:
        """Append the events; returns self."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case ToolArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
        return self


class Parser:
    """Turns text deltas into events; a subclass implements `run`."""

    # Special tokens that the detokenizer must keep in the text, because this parser looks for them.
    special_tokens: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def answer_header(cls, prompt: str) -> str:
        """The text that must follow a rendered chat so that the output is the answer alone.

        A grammar applies from the first token on, so it needs this.
        """
        return ""

    def __init__(self) -> None:
        self._buffer = ""
        self._closed = False
        self._events: list[Event] = []
        self._machine = self.run()
        self._ended: bool | None = False
        self._space = ""  # white space at the end of the content, held back

    def push(self, text: str) -> list[Event]:
        """Read more text; returns the events that it completes."""
        self._buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """End the text; returns the events that were held back. Don't call `push` after it."""
        self._closed = True
        return self._advance()

    def _advance(self) -> list[Event]:
        self._ended = self._ended or next(self._machine, True)
        if self._ended and self._buffer:  # `run` has returned: all further text is content
            self.content(self.take(len(self._buffer)))
        events, self._events = self._events, []
        return events

    def run(self) -> Wait[None]:
        """Read the text and emit events; all text after the return is content."""
        raise NotImplementedError

    # --- reading ------------------------------------------------------------------------------

    def more(self) -> Wait[bool]:
        """Wait for more text; returns False at the end of the text."""
        if self._closed:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """Return the next character without consuming it; "" at the end of the text."""
        while not self._buffer and (yield from self.more()):
            pass
        return self._buffer[:1]

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters, which must be in the buffer."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def take_space(self) -> Wait[str]:
        space = ""
        while (yield from self.peek()).isspace():
            rest = self._buffer.lstrip()
            space += self.take(len(self._buffer) - len(rest))
        return space

    def take_any(self, options: Sequence[str]) -> Wait[str]:
        """Consume and return the first of `options` that the text continues with, or ""."""
        while True:
            for option in options:
                if self._buffer.startswith(option):
                    return self.take(len(option))
            if not any(option.startswith(self._buffer) for option in options):
                return ""
            if not (yield from self.more()):
                return ""

    def take_through(self, ends: Callable[[str], bool]) -> Wait[tuple[str, bool]]:
        """Consume the text up to and including the first character for which `ends` is true.

        `ends` is called once per character, in order. Returns the text and whether such a character
        was found.
        """
        pieces: list[str] = []
        while (yield from self.peek()):
            found = next((n for n, char in enumerate(self._buffer) if ends(char)), None)
            pieces.append(self.take(len(self._buffer) if found is None else found + 1))
            if found is not None:
                return "".join(pieces), True
        return "".join(pieces), False

    def take_until(self, markers: Sequence[str], sink: Callable[[str], None]) -> Wait[str]:
        """Pass all text before the next marker to `sink`, and consume the marker.

        Returns the marker, or "" if the text ends before one."""
        while True:
            found = [(at, m) for m in markers if (at := self._buffer.find(m)) >= 0]
            if found:
                at, marker = min(found)
                sink(self.take(at))
                return self.take(len(marker))
            sink(self.take(len(self._buffer) - self._partial(markers)))
            if not (yield from self.more()):
                sink(self.take(len(self._buffer)))
                return ""

    def _partial(self, markers: Sequence[str]) -> int:
        """The length of the longest suffix of the buffer that may become a marker."""
        most = min(len(self._buffer), max(map(len, markers)) - 1)
        ends = (self._buffer[len(self._buffer) - n :] for n in range(most, 0, -1))
        return next((len(end) for end in ends if any(m.startswith(end) for m in markers)), 0)

    # --- emitting -----------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Emit content, but hold back its trailing white space, which a tool call drops."""
        kept = text.rstrip()
        if kept:
            self.emit(ContentDelta(self._space + kept))
            self._space = ""
        self._space += text[len(kept) :]

    def drop_space(self) -> None:
        self._space = ""

    def flush_space(self) -> None:
        if self._space:
            self.emit(ContentDelta(self._space))
        self._space = ""

    def emit(self, event: Event) -> None:
        """Queue an event, merged with the last one if both are text of the same kind."""
        last = self._events[-1] if self._events else None
        match last, event:
            case (ContentDelta(a), ContentDelta(b)):
                self._events[-1] = ContentDelta(a + b)
            case (ReasoningDelta(a), ReasoningDelta(b)):
                self._events[-1] = ReasoningDelta(a + b)
            case (ToolArgumentsDelta(i, a), ToolArgumentsDelta(j, b)) if i == j:
                self._events[-1] = ToolArgumentsDelta(i, a + b)
            case _:
                self._events.append(event)


def _parameters(function: Mapping[str, Any]) -> list[str]:
    return list((function.get("parameters") or {}).get("properties") or {})


class ToolParser(Parser):
    """Base class of parsers that find tool calls; all other text becomes content.

    `tools` are the request's tools. Formats that resemble ordinary text accept only calls of these;
    without tools, calls of any name.
    """

    # Whether it parses whole outputs, reasoning included. It then gets the rendered chat, too, and
    # takes part in every chat, with or without tools.
    reads_reasoning: ClassVar[bool] = False
    # Tokens that end an output, in addition to the model's own.
    end_tokens: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
        prompt: str = "",  # the rendered chat, for parsers that read reasoning
    ) -> None:
        super().__init__()
        functions = [tool.get("function") or tool for tool in tools or []]
        # function name -> names of its parameters in order; None: every function name is accepted
        self.known = {f["name"]: _parameters(f) for f in functions} if tools else None
        self.num_calls = 0
        self._after_call = False  # only white space has followed the last call
        self._new_id = new_id or self.make_id

    @staticmethod
    def make_id() -> str:
        """A new id for a call; a subclass may need another format."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def finish(self) -> list[Event]:
        """As the base class; white space after the last call is dropped."""
        events = super().finish()
        if not self._after_call:
            self.flush_space()
            events += self._events
            self._events = []
        return events

    def content(self, text: str) -> None:
        """As the base class; also tracks whether a call was the last visible output."""
        super().content(text)
        self._after_call = self._after_call and not text.strip()

    def is_known(self, name: str) -> bool:
        """Whether the request has a tool of this name; True if it has no tools."""
        return self.known is None or name in self.known

    def take_end(self, marker: str) -> Wait[None]:
        """Consume the marker that ends a call, if it comes next, with white space before it."""
        space = yield from self.take_space()
        if not (yield from self.take_any([marker])):
            self.content(space)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        self.drop_space()
        self._after_call = True
        self.emit(ToolCallStart(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit a piece of the arguments of the latest call."""
        if text:
            self.emit(ToolArgumentsDelta(self.num_calls - 1, text))
