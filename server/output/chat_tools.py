"""Decides which tools a chat's model sees, which grammar constrains it and how its text is parsed.

This depends on the request and on the model's format, not on the text.
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
from ..tool_parsers.base import Parser, ToolParser
from ..tool_parsers.deepseek import DsmlToolParser
from ..tool_parsers.forced import ForcedToolParser, forced_grammar, strict_grammar
from ..tool_parsers.hermes import BEGIN, HermesToolParser
from .chat_output import EventParser, MessageParser, OutputParser, PlainText
from .grammars import grammar_of, grammar_of_calls
from .reasoning import ReasoningParser, detect_reasoning_parser, reasoning_parser_class

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class OutputFormat:
    """The parsers for the model's tool calls and reasoning; None if it does not write them."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    # Whether the marker of a tool call is ordinary text, which a grammar needs, or a special token.
    has_plain_markers: bool = True

    @classmethod
    def of(
        cls, server: ServerConfig, template: ChatTemplate, tokenizer: Tokenizer | None = None
    ) -> OutputFormat:
        """The format that the flags name; "auto" detects it from the chat template.

        Raises ValueError for unknown names.
        """
        tools: str | None = server.tool_call_parser
        if tools == "auto":
            tools = detect_tool_parser(template.source, template.supports_tools)
        parser = tool_parser_class(tools) if tools and tools != "none" else None
        reasoning: str | None = server.reasoning_parser
        if reasoning == "auto":
            reasoning = detect_reasoning_parser(template.source)
        if parser is not None and parser.reads_reasoning:
            reasoning = None
        return cls(
            parser,
            reasoning_parser_class(reasoning) if reasoning and reasoning != "none" else None,
            tokenizer is None or tokenizer.token_to_id(BEGIN) not in tokenizer.special_ids,
        )

    def grammar_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that grammars of calls must be able to spell."""
        dsml = self._dsml
        ids = (tokenizer.token_to_id(token) for token in dsml.grammar_tokens) if dsml else ()
        return frozenset(index for index in ids if index is not None)

    def answer_header(self, prompt: str) -> str:
        """The text that must follow a rendered chat so that the output is the answer alone."""
        parsers: list[type[Parser] | None] = [self.tools, self.reasoning]
        headers = (parser.answer_header(prompt) for parser in parsers if parser)
        return next(filter(None, headers), "")

    def forced_grammar(
        self, tools: Tools, name: str | None, parallel: bool, budget: Budget
    ) -> GrammarSpec:
        """The grammar of a reply of calls alone, or of one of `name`: in DSML if the model writes
        it, else as JSON."""
        form = self._dsml.forced_grammar if self._dsml else forced_grammar
        return form(tools, name, parallel, budget)

    def forced_parser(self, tools: Tools | None, name: str | None) -> ToolParser:
        """A parser of what `forced_grammar` allows."""
        if self._dsml:
            return self._dsml(tools, is_forced=True)
        return ForcedToolParser(name, tools)

    @property
    def _dsml(self) -> type[DsmlToolParser] | None:
        return self.tools if self.tools and issubclass(self.tools, DsmlToolParser) else None

    def strict_grammar(self, tools: Tools, budget: Budget) -> GrammarSpec | None:
        """The grammar for calls of functions with "strict": true, if the model need not call."""
        if self._dsml:
            return self._dsml.strict_grammar(tools, budget)
        if self.tools is not HermesToolParser or not self.has_plain_markers:
            return None
        return strict_grammar(tools, budget)


@dataclass(frozen=True)
class ChatFormat:
    """How the output of one chat is constrained and parsed."""

    model: OutputFormat = field(default_factory=OutputFormat)
    tools: Tools | None = None  # as passed to the template
    grammar: GrammarSpec | None = None  # constrains the output
    forced: bool = False  # the output must consist of calls
    name: str | None = None  # the function that the client named
    reasoning: bool = True  # parse reasoning
    show_reasoning: bool = True
    parallel: bool = True
    legacy: bool = False  # the request uses `functions`, OpenAI's older form

    def parser(self, prompt: str) -> MessageParser:
        output = self._output(prompt)
        if output is None:
            return PlainText()
        return EventParser(output, self.show_reasoning, self.parallel, self.legacy)

    def kept_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that detokenization must keep for the parser."""
        output = self._output("")
        return output.kept_ids(tokenizer) if output else frozenset()

    def end_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens that end an output, in addition to the model's own."""
        tokens = self.model.tools.end_tokens if self.model.tools else ()
        return frozenset(i for token in tokens if (i := tokenizer.token_to_id(token)) is not None)

    def prompt_end(self, prompt: str) -> str:
        """The text to append to the rendered chat `prompt`."""
        constrained = self.grammar is not None and not self.reasoning
        return self.model.answer_header(prompt) if constrained else ""

    def finish_reason(self, reason: str, called: bool) -> str:
        """OpenAI's finish reason; `called` means that the output contains a call.

        It is "tool_calls" (or "function_call") for calls, unless the request named the function.
        """
        if not called or reason != "stop" or self.name is not None:
            return reason
        return "function_call" if self.legacy else "tool_calls"

    def _output(self, prompt: str) -> OutputParser | None:
        if self.forced:
            return OutputParser(None, self.model.forced_parser(self.tools, self.name))
        whole = self.model.tools
        if whole is not None and whole.reads_reasoning:
            return OutputParser(None, whole(self.tools, prompt=prompt))
        reads = self.model.reasoning if self.reasoning else None
        calls = self.model.tools if self.tools else None
        if reads is None and calls is None:
            return None
        return OutputParser(reads(prompt) if reads else None, calls(self.tools) if calls else None)


def chat_format(model: OutputFormat, body: ChatCompletionRequest) -> ChatFormat:
    """The format for a request. Raises InvalidRequest if its tools and tool_choice disagree."""
    calls = _calls_of_functions(body) if body.functions else _calls_of_tools(body)
    forced = bool(calls.tools) and calls.mode == "required"
    constraint = grammar_of_calls(body) if forced else grammar_of(body)
    # A grammar applies from the first token on, so no reasoning can precede it.
    plain = ChatFormat(
        model,
        grammar=constraint,
        reasoning=constraint is None,
        show_reasoning=body.include_reasoning is not False,
    )
    if not calls.tools or calls.mode == "none":
        return plain
    if constraint is not None and forced:
        raise _wrong(calls.param, "forced tool calls cannot be combined with another output format")
    try:
        schemas = [(tool.get("function") or tool).get("parameters") or {} for tool in calls.tools]
        budget = Budget.of(*schemas)
        grammar = constraint
        if forced:
            grammar = model.forced_grammar(calls.tools, calls.name, calls.parallel, budget)
        elif constraint is None:
            grammar = model.strict_grammar(calls.tools, budget)
    except SchemaError as error:
        param = "functions" if calls.legacy else "tools"
        raise _wrong(param, f"invalid parameters: {error}") from None
    if calls.mode == "auto":
        return replace(
            plain, tools=calls.tools, grammar=grammar, parallel=calls.parallel, legacy=calls.legacy
        )
    return ChatFormat(
        model,
        tools=calls.tools,
        grammar=grammar,
        forced=True,
        name=calls.name,
        reasoning=False,
        parallel=calls.parallel,
        legacy=calls.legacy,
    )


@dataclass(frozen=True)
class _AllowedCalls:
    """The calls that a request allows or forces; `param` is the parameter that says so."""

    tools: Tools
    mode: str  # "none", "auto" or "required"
    name: str | None = None  # the function that must be called
    parallel: bool = True
    legacy: bool = False
    param: str = "tool_choice"


def _calls_of_tools(body: ChatCompletionRequest) -> _AllowedCalls:
    """The calls that `tools`, `tool_choice` and `parallel_tool_calls` allow."""
    if body.function_call is not None and body.function_call != "none":
        raise _wrong("function_call", "it is only allowed when 'functions' are given")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    tool_choice = body.tool_choice
    if not tools:
        if tool_choice is not None and tool_choice != "none":
            raise _wrong("tool_choice", "it is only allowed when 'tools' are given")
        return _AllowedCalls(tools, "none")
    parallel = body.parallel_tool_calls is not False
    names = {tool["function"]["name"] for tool in tools}
    if isinstance(tool_choice, AllowedToolsChoice):
        allowed = {named.function.name for named in tool_choice.allowed_tools.tools}
        _refuse_unknown(allowed - names, "tool_choice")
        shown = [tool for tool in tools if tool["function"]["name"] in allowed]
        return _AllowedCalls(shown, tool_choice.allowed_tools.mode, None, parallel)
    if isinstance(tool_choice, NamedToolChoice):
        _refuse_unknown({tool_choice.function.name} - names, "tool_choice")
        return _AllowedCalls(tools, "required", tool_choice.function.name, parallel)
    return _AllowedCalls(tools, tool_choice or "auto", None, parallel)


def _calls_of_functions(body: ChatCompletionRequest) -> _AllowedCalls:
    """The calls that `functions` and `function_call` allow: at most one."""
    if body.tools or body.tool_choice is not None:
        raise _wrong("functions", "they cannot be combined with 'tools' or 'tool_choice'")
    functions = [each.model_dump(exclude_none=True) for each in body.functions or ()]
    tools = [{"type": "function", "function": function} for function in functions]
    function_call = body.function_call
    if isinstance(function_call, FunctionName):
        _refuse_unknown(
            {function_call.name} - {each["name"] for each in functions}, "function_call"
        )
        return _AllowedCalls(tools, "required", function_call.name, False, True, "function_call")
    return _AllowedCalls(tools, function_call or "auto", None, False, True, "function_call")


def _refuse_unknown(names: set[str], param: str) -> None:
    for name in sorted(names)[:1]:
        raise _wrong(param, f"unknown tool {name[:64]!r}")


def _wrong(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param, "invalid_value")
