"""Decides how a chat's output is read: which tools the model sees, what may come, who parses.

It knows the request and the model's format, not the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...configs.schema import ServerConfig
from ...runner.messages import GrammarSpec
from ..chat_templates.chat_template import ChatTemplate
from ..errors import InvalidRequest
from ..json_schema import Budget, SchemaError
from ..openai_types.chat import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    FunctionName,
    NamedToolChoice,
)
from ..text.tokenizer import Tokenizer
from ..tool_parsers import detect_tool_parser, tool_parser_class
from ..tool_parsers.base import ToolParser
from ..tool_parsers.forced import ForcedToolParser, forced_grammar
from ..tool_parsers.hermes import BEGIN, HermesToolParser
from ..tool_parsers.strict import strict_grammar
from .chat_output import EventParser, MessageParser, PlainText
from .grammars import grammar_of, grammar_of_calls
from .output_parser import OutputParser, TokenIds
from .reasoning import ReasoningParser, detect_reasoning_parser, reasoning_parser_class

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class OutputFormat:
    """How the model writes tool calls and reasoning; None where it does not."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    # A grammar that begins with a call's marker needs the marker to be text, no special token.
    has_plain_markers: bool = True

    @classmethod
    def of(
        cls, server: ServerConfig, template: ChatTemplate, tokenizer: Tokenizer | None = None
    ) -> OutputFormat:
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
            tokenizer is None or tokenizer.token_to_id(BEGIN) not in tokenizer.special_ids,
        )

    def strict_grammar(self, tools: Tools, budget: Budget) -> GrammarSpec | None:
        """What keeps calls of strict functions to their parameters, where the model may call."""
        if self.tools is not HermesToolParser or not self.has_plain_markers:
            return None
        return strict_grammar(tools, budget)


@dataclass(frozen=True)
class ChatFormat:
    """How one chat's output is made and read."""

    model: OutputFormat = field(default_factory=OutputFormat)
    tools: Tools | None = None  # as the template gets them
    grammar: GrammarSpec | None = None  # of forced or strict calls
    forced: bool = False  # the output is calls and nothing else
    name: str | None = None  # the function that the client named
    reasoning: bool = True  # look for reasoning
    show_reasoning: bool = True
    parallel: bool = True
    legacy: bool = False  # the client speaks of functions, not of tools

    def parser(self, prompt: str) -> MessageParser:
        """A parser for one choice of the rendered chat `prompt`."""
        output = self._output(prompt)
        if output is None:
            return PlainText()
        return EventParser(output, self.show_reasoning, self.parallel, self.legacy)

    def kept_ids(self, tokenizer: TokenIds) -> frozenset[int]:
        """Special tokens that must stay in the text for the parser to see."""
        output = self._output("")
        return output.kept_ids(tokenizer) if output else frozenset()

    def finish_reason(self, reason: str, called: bool) -> str:
        """OpenAI's reason: "tool_calls" where the model chose to call."""
        if not called or reason != "stop" or self.name is not None:
            return reason
        return "function_call" if self.legacy else "tool_calls"

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
    wish = _wish_of_functions(body) if body.functions else _wish(body)
    forced = bool(wish.tools) and wish.mode == "required"
    constraint = grammar_of_calls(body) if forced else grammar_of(body)
    # A grammar holds from the first token on, so there is no room for reasoning before it.
    plain = ChatFormat(
        model,
        grammar=constraint,
        reasoning=constraint is None,
        show_reasoning=body.include_reasoning is not False,
    )
    if not wish.tools or wish.mode == "none":
        return plain
    if constraint is not None and forced:
        raise _wrong(wish.param, "forced tool calls cannot be combined with another output format")
    try:
        schemas = [(tool.get("function") or tool).get("parameters") or {} for tool in wish.tools]
        budget = Budget.of(*schemas)
        grammar = constraint
        if forced:
            grammar = forced_grammar(wish.tools, wish.name, wish.parallel, budget)
        elif constraint is None:
            grammar = model.strict_grammar(wish.tools, budget)
    except SchemaError as error:
        param = "functions" if wish.legacy else "tools"
        raise _wrong(param, f"invalid parameters: {error}") from None
    if wish.mode == "auto":
        return replace(
            plain, tools=wish.tools, grammar=grammar, parallel=wish.parallel, legacy=wish.legacy
        )
    return ChatFormat(
        model,
        tools=wish.tools,
        grammar=grammar,
        forced=True,
        name=wish.name,
        reasoning=False,
        parallel=wish.parallel,
        legacy=wish.legacy,
    )


@dataclass(frozen=True)
class _Wish:
    """Which calls the client wants; `param` is where it said so."""

    tools: Tools
    mode: str  # none, auto, required; a name forces that function
    name: str | None = None
    parallel: bool = True
    legacy: bool = False
    param: str = "tool_choice"


def _wish(body: ChatCompletionRequest) -> _Wish:
    if body.function_call is not None and body.function_call != "none":
        raise _wrong("function_call", "it is only allowed when 'functions' are given")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice
    if not tools:
        if choice is not None and choice != "none":
            raise _wrong("tool_choice", "it is only allowed when 'tools' are given")
        return _Wish(tools, "none")
    parallel = body.parallel_tool_calls is not False
    names = {tool["function"]["name"] for tool in tools}
    if isinstance(choice, AllowedToolsChoice):
        allowed = {named.function.name for named in choice.allowed_tools.tools}
        _refuse_unknown(allowed - names, "tool_choice")
        shown = [tool for tool in tools if tool["function"]["name"] in allowed]
        return _Wish(shown, choice.allowed_tools.mode, None, parallel)
    if isinstance(choice, NamedToolChoice):
        _refuse_unknown({choice.function.name} - names, "tool_choice")
        return _Wish(tools, "required", choice.function.name, parallel)
    return _Wish(tools, choice or "auto", None, parallel)


def _wish_of_functions(body: ChatCompletionRequest) -> _Wish:
    """`functions` and `function_call`, which `tools` followed: one call at most."""
    if body.tools or body.tool_choice is not None:
        raise _wrong("functions", "they cannot be combined with 'tools' or 'tool_choice'")
    functions = [each.model_dump(exclude_none=True) for each in body.functions or ()]
    tools = [{"type": "function", "function": function} for function in functions]
    choice = body.function_call
    if isinstance(choice, FunctionName):
        _refuse_unknown({choice.name} - {each["name"] for each in functions}, "function_call")
        return _Wish(tools, "required", choice.name, False, True, "function_call")
    return _Wish(tools, choice or "auto", None, False, True, "function_call")


def _refuse_unknown(names: set[str], param: str) -> None:
    for name in sorted(names)[:1]:
        raise _wrong(param, f"unknown tool {name[:64]!r}")


def _wrong(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param, "invalid_value")
