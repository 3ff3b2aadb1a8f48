"""Separates a model's reasoning from its answer, in text that arrives in pieces of any size."""

from __future__ import annotations

from typing import ClassVar

from ..tool_parsers.base import ContentDelta, Parser, ReasoningDelta, Wait
from ..tool_parsers.deepseek import BLOCKS, INVOKE


class ReasoningParser(Parser):
    """Parses reasoning between two markers at the start of the output.

    `prompt` is the rendered chat; its end shows whether the output starts inside the reasoning.
    White space around reasoning is dropped.
    """

    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    starts_inside: ClassVar[bool] = False  # if the prompt does not show it
    begins_answer: ClassVar[tuple[str, ...]] = ()  # texts that end reasoning and belong to the rest
    special_tokens = ("<think>", "</think>")

    def __init__(self, prompt: str | None = None) -> None:
        tail = (prompt or "").rstrip()
        opened = tail.endswith(self.begin.rstrip())
        closed = tail.endswith(self.end)
        self._inside = opened or (self.starts_inside and not closed)
        super().__init__()

    def run(self) -> Wait[None]:
        space = yield from self.take_space()
        began = bool((yield from self.take_any([self.begin])))
        if began or self._inside:
            yield from self._reasoning()
        else:
            self.content(space)

    def _reasoning(self) -> Wait[None]:
        """Emit the text before the end marker as reasoning."""
        yield from self.take_space()
        self._space = ""
        marker = yield from self.take_until([self.end, *self.begins_answer], self._reason)
        if marker != self.end:
            self._buffer = marker + self._buffer
        self._space = ""
        yield from self.take_space()

    def _reason(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self.emit(ReasoningDelta(self._space + kept))
            self._space = ""
        self._space += text[len(kept) :]

    def content(self, text: str) -> None:
        if text:
            self.emit(ContentDelta(text))


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1 always reasons first, even without writing the opening marker."""

    starts_inside = True


class DeepSeekV4Parser(ReasoningParser):
    """DeepSeek V4 reasons if the end of the prompt has the opening marker; without reasoning, the
    prompt ends with the closing one. It may call a tool without closing its reasoning."""

    begins_answer = (*BLOCKS, INVOKE)

    @classmethod
    def answer_header(cls, prompt: str) -> str:
        return cls.end if prompt.endswith(cls.begin) else ""


class Qwen3Parser(ReasoningParser):
    """Qwen 3 reasons if the output or the end of the prompt has the opening marker."""


class GemmaParser(ReasoningParser):
    """Gemma 4 reasons in a thought channel, which may reopen between parts of the answer."""

    begin = "<|channel>thought"
    end = "<channel|>"
    special_tokens = ("<|channel>", "<channel|>")

    def run(self) -> Wait[None]:
        yield from super().run()
        while (yield from self.take_until([self.begin], self.content)):
            yield from self._reasoning()


_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "qwen3": Qwen3Parser,
    "gemma": GemmaParser,
    "gemma4": GemmaParser,
}
REASONING_PARSERS = tuple(_PARSERS)


def reasoning_parser_class(name: str) -> type[ReasoningParser]:
    """The parser class of a format. Raises ValueError unless it is in REASONING_PARSERS."""
    if name not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise ValueError(f"Unknown reasoning parser {name!r}. Available: {known}.")
    return _PARSERS[name]


def detect_reasoning_parser(chat_template: str | None) -> str | None:
    """The reasoning format with markers in the chat template, or None."""
    template = chat_template or ""
    if "<|channel>" in template:
        return "gemma"
    if "｜DSML｜" in template:
        return "deepseek_v4"
    if "</think>" in template or "<think>" in template:
        return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
    return None
