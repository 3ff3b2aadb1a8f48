"""Decides how a chat's output is read: which tools the model sees, what may come, who parses.

It knows the request and the model's format, not the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..configs.schema import ServerConfig
from ..runner.messages import GrammarSpec
from .chat_output import EventParser, MessageParser, PlainText
from .chat_template import ChatTemplate
from .errors import InvalidRequest
from .json_schema import SchemaError
from .openai_types.chat import ChatCompletionRequest, NamedToolChoice
from .output_parser import OutputParser, TokenIds
from .reasoning import ReasoningParser, detect_reasoning_parser, reasoning_parser_class
from .sampling import grammar_of
from .tool_parsers import detect_tool_parser, tool_parser_class
from .tool_parsers.base import ToolParser
from .tool_parsers.forced import ForcedToolParser, forced_grammar

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class OutputFormat:
    """How the model writes tool calls and reasoning; None where it does not."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @classmethod
    def of(cls, server: ServerConfig, template: ChatTemplate) -> OutputFormat:
        """By the flags, or read off the template. ValueError for a name that is not known."""
        tools: str | None = server.tool_call_parser
        if tools == "auto":
            tools = detect_tool_parser(template.source, template.supports_tools)
        reasoning: str | None = server.reasoning_parser
        if reasoning == "auto":
            reasoning = detect_reasoning_parser(template.source)
        return cls(
            tool_parser_class(tools) if tools and tools != "none" else None,
            reasoning_parser_class(reasoning) if reasoning and reasoning != "none" else None,
        )


@dataclass(frozen=True)
class ChatFormat:
    """How one chat's output is made and read."""

    model: OutputFormat = field(default_factory=OutputFormat)
    tools: Tools | None = None  # as the template gets them
    grammar: GrammarSpec | None = None  # of forced calls
    forced: bool = False  # the output is calls and nothing else
    name: str | None = None  # the function that the client named
    reasoning: bool = True  # look for reasoning
    show_reasoning: bool = True
    parallel: bool = True

    def parser(self, prompt: str) -> MessageParser:
        """A parser for one choice of the rendered chat `prompt`."""
        output = self._output(prompt)
        if output is None:
            return PlainText()
        return EventParser(output, self.show_reasoning, self.parallel)

    def kept_ids(self, tokenizer: TokenIds) -> frozenset[int]:
        """Special tokens that must stay in the text for the parser to see."""
        output = self._output("")
        return output.kept_ids(tokenizer) if output else frozenset()

    def finish_reason(self, reason: str, called: bool) -> str:
        """OpenAI's reason: "tool_calls" where the model chose to call."""
        return "tool_calls" if called and reason == "stop" and self.name is None else reason

    def _output(self, prompt: str) -> OutputParser | None:
        if self.forced:
            return OutputParser(None, ForcedToolParser(self.name, self.tools))
        reads = self.model.reasoning if self.reasoning else None
        calls = self.model.tools if self.tools else None
        if reads is None and calls is None:
            return None
        return OutputParser(reads(prompt) if reads else None, calls(self.tools) if calls else None)


def chat_format(model: OutputFormat, body: ChatCompletionRequest) -> ChatFormat:
    """How this request's output is read. InvalidRequest if tools and tool_choice disagree."""
    choice, constrained = body.tool_choice, grammar_of(body) is not None
    # A grammar holds from the first token on, so there is no room for reasoning before it.
    plain = ChatFormat(
        model, reasoning=not constrained, show_reasoning=body.include_reasoning is not False
    )
    if not body.tools:
        if choice is not None and choice != "none":
            raise _wrong_choice("it is only allowed when 'tools' are given")
        return plain
    if choice == "none":
        return plain
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    parallel = body.parallel_tool_calls is not False
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if name is None and choice != "required":
        return ChatFormat(
            model, tools, None, False, None, not constrained, plain.show_reasoning, parallel
        )
    if constrained:
        raise _wrong_choice("forced calls leave no room for another output format")
    if name is not None and name not in _names(body):
        raise _wrong_choice(f"there is no tool {name[:64]!r}")
    try:
        grammar = forced_grammar(tools, name, parallel)
    except (SchemaError, RecursionError) as error:
        why = str(error) if isinstance(error, SchemaError) else "they are nested too deep"
        raise InvalidRequest(
            f"Invalid value for 'tools': wrong parameters: {why}.", "tools", "invalid_value"
        ) from None
    return ChatFormat(model, tools, grammar, True, name, False, True, parallel)


def _names(body: ChatCompletionRequest) -> Sequence[str]:
    return [tool.function.name for tool in body.tools or ()]


def _wrong_choice(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid value for 'tool_choice': {reason}.", "tool_choice", "invalid_value"
    )
