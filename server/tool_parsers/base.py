"""Events of a parsed model output, and the base of every parser that makes them from text deltas.

A parser is written as one generator, `run`, that reads the text as if it were a file and waits
where text is missing. So what it emits depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]  # a step of `run` that may wait for text


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow, then the next call or content."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """The next piece of a call's arguments, which together are JSON text."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


@dataclass
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedOutput:
    """All events of one output, joined: what a response that is not streamed holds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> ParsedOutput:
        """Join more events; returns self."""
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
    """Turns text deltas into events; a subclass writes `run`."""

    # Tokens that detokenization must keep for this parser, though they are special.
    special_tokens: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._buffer = ""
        self._closed = False
        self._events: list[Event] = []
        self._machine = self.run()
        self._ended: bool | None = False
        self._space = ""  # white space of the content that is held back

    def push(self, text: str) -> list[Event]:
        """The events that this text completes."""
        self._buffer += text
        return self._advance()

    def finish(self) -> list[Event]:
        """The events that were waiting for more text; nothing may be pushed afterwards."""
        self._closed = True
        return self._advance()

    def _advance(self) -> list[Event]:
        self._ended = self._ended or next(self._machine, True)
        if self._ended and self._buffer:  # run came to its end early: the rest is content
            self.content(self.take(len(self._buffer)))
        events, self._events = self._events, []
        return events

    def run(self) -> Wait[None]:
        """Read the text, and emit; where this returns, what follows is content."""
        raise NotImplementedError

    # --- reading ------------------------------------------------------------------------------

    def more(self) -> Wait[bool]:
        """Wait for more text; False when there is none."""
        if self._closed:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """The next character without taking it; "" at the end."""
        while not self._buffer and (yield from self.more()):
            pass
        return self._buffer[:1]

    def take(self, count: int) -> str:
        """Remove characters that have been seen."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def take_space(self) -> Wait[str]:
        """All white space that comes next."""
        space = ""
        while (yield from self.peek()).isspace():
            rest = self._buffer.lstrip()
            space += self.take(len(self._buffer) - len(rest))
        return space

    def take_any(self, options: Sequence[str]) -> Wait[str]:
        """The first option that comes next, taken; "" if none does."""
        while True:
            for option in options:
                if self._buffer.startswith(option):
                    return self.take(len(option))
            if not any(option.startswith(self._buffer) for option in options):
                return ""
            if not (yield from self.more()):
                return ""

    def take_through(self, ends: Callable[[str], bool]) -> Wait[tuple[str, bool]]:
        """All text up to the character for which `ends` is true, and whether there was one.

        `ends` sees every character once, in order.
        """
        pieces: list[str] = []
        while (yield from self.peek()):
            found = next((n for n, char in enumerate(self._buffer) if ends(char)), None)
            pieces.append(self.take(len(self._buffer) if found is None else found + 1))
            if found is not None:
                return "".join(pieces), True
        return "".join(pieces), False

    def take_until(self, markers: Sequence[str], sink: Callable[[str], None]) -> Wait[str]:
        """Give all text before the next marker to `sink`; the marker, taken, or "" at the end."""
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
        """Length of the longest end of the buffer that may become a marker."""
        most = min(len(self._buffer), max(map(len, markers)) - 1)
        ends = (self._buffer[len(self._buffer) - n :] for n in range(most, 0, -1))
        return next((len(end) for end in ends if any(m.startswith(end) for m in markers)), 0)

    # --- emitting -----------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Emit content. Its last white space waits: before a tool call it is dropped."""
        kept = text.rstrip()
        if kept:
            self.emit(ContentDelta(self._space + kept))
            self._space = ""
        self._space += text[len(kept) :]

    def drop_space(self) -> None:
        """Forget the white space that waits."""
        self._space = ""

    def flush_space(self) -> None:
        """Emit the white space that waits."""
        if self._space:
            self.emit(ContentDelta(self._space))
        self._space = ""

    def emit(self, event: Event) -> None:
        """Queue an event, joined to the last one where both are text of one kind."""
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


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser(Parser):
    """Finds tool calls; what is no well-formed call is content, and no text is lost.

    `tools` are the request's tools. Formats that look like ordinary text accept only their names.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        super().__init__()
        functions = [tool.get("function") or tool for tool in tools or []]
        # name -> its parameters' names in order; None accepts every name
        self.known = {f["name"]: _parameters(f) for f in functions} if tools else None
        self.num_calls = 0
        self._after_call = False  # nothing but white space since the last call
        self._new_id = new_id or self.make_id

    @staticmethod
    def make_id() -> str:
        """A fresh id for a call."""
        return new_call_id()

    def finish(self) -> list[Event]:
        """The last events; white space behind the last call is dropped."""
        events = super().finish()
        if not self._after_call:
            self.flush_space()
            events += self._events
            self._events = []
        return events

    def content(self, text: str) -> None:
        """As the base, remembering whether the last visible thing was a call."""
        super().content(text)
        self._after_call = self._after_call and not text.strip()

    def is_known(self, name: str) -> bool:
        """Whether the request has such a tool, as far as it named any."""
        return self.known is None or name in self.known

    def take_end(self, marker: str) -> Wait[None]:
        """Drop the marker that ends a call, and the white space before it, if it comes next."""
        space = yield from self.take_space()
        if not (yield from self.take_any([marker])):
            self.content(space)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of the next call."""
        self.drop_space()
        self._after_call = True
        self.emit(ToolCallStart(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit arguments of the call that was started last."""
        if text:
            self.emit(ToolArgumentsDelta(self.num_calls - 1, text))
