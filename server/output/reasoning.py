"""Tells a model's reasoning from its answer, in text deltas of any cut."""

from __future__ import annotations

from typing import ClassVar

from ..tool_parsers.base import ContentDelta, Parser, ReasoningDelta, Wait


class ReasoningParser(Parser):
    """Reasoning between two markers at the start of the output.

    `prompt` is the rendered chat: its end tells whether the model already is inside its reasoning.
    White space around reasoning is dropped.
    """

    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    starts_inside: ClassVar[bool] = False  # where the prompt does not tell
    special_tokens = ("<think>", "</think>")

    def __init__(self, prompt: str | None = None) -> None:
        tail = (prompt or "").rstrip()
        opened = tail.endswith(self.begin.rstrip())
        closed = tail.endswith(self.end)
        self._inside = opened or (self.starts_inside and not closed)
        super().__init__()

    def run(self) -> Wait[None]:
        """See the base."""
        space = yield from self.take_space()
        began = bool((yield from self.take_any([self.begin])))
        if began or self._inside:
            yield from self._reasoning()
        else:
            self.content(space)

    def _reasoning(self) -> Wait[None]:
        """Emit up to the end marker."""
        yield from self.take_space()
        self._space = ""
        yield from self.take_until([self.end], self._reason)
        self._space = ""
        yield from self.take_space()

    def _reason(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self.emit(ReasoningDelta(self._space + kept))
            self._space = ""
        self._space += text[len(kept) :]

    def content(self, text: str) -> None:
        """Emit content as it is."""
        if text:
            self.emit(ContentDelta(text))


class DeepSeekR1Parser(ReasoningParser):
    """The model always reasons first, even where it leaves out the first marker."""

    starts_inside = True


class Qwen3Parser(ReasoningParser):
    """The model reasons if it says so itself, or if the prompt does."""


class GemmaParser(ReasoningParser):
    """Gemma 4's thought channel, which may open again between parts of the answer."""

    begin = "<|channel>thought"
    end = "<channel|>"
    special_tokens = ("<|channel>", "<channel|>")

    def run(self) -> Wait[None]:
        """See the base."""
        yield from super().run()
        while (yield from self.take_until([self.begin], self.content)):
            yield from self._reasoning()


_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "qwen3": Qwen3Parser,
    "gemma": GemmaParser,
    "gemma4": GemmaParser,
}
REASONING_PARSERS = tuple(_PARSERS)


def reasoning_parser_class(name: str) -> type[ReasoningParser]:
    """The parser of a format. Raises ValueError for a name that is not in REASONING_PARSERS."""
    if name not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise ValueError(f"Unknown reasoning parser {name!r}. Available: {known}.")
    return _PARSERS[name]


def detect_reasoning_parser(chat_template: str | None) -> str | None:
    """The format whose markers a chat template mentions, or None."""
    template = chat_template or ""
    if "<|channel>" in template:
        return "gemma"
    if "</think>" in template or "<think>" in template:
        return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
    return None
