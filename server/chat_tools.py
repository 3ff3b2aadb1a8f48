"""Decides how a chat's output is read: which tools the model sees, what may come, who parses.

It knows the request and the model's format, not the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..runner.messages import GrammarSpec
from .chat_output import MessageParser, PlainText
from .errors import InvalidRequest
from .openai_types.chat import ChatCompletionRequest, NamedToolChoice
from .services import Services


@dataclass(frozen=True)
class ChatFormat:
    """How one chat's output is made and read."""

    tools: list[dict[str, Any]] | None = None  # as the template gets them
    grammar: GrammarSpec | None = None
    keep_token_ids: frozenset[int] = frozenset()  # special tokens that the parser must see
    named: bool = False  # the client named the function to call

    def parser(self) -> MessageParser:
        """A parser for one choice."""
        return PlainText()

    def finish_reason(self, reason: str, called: bool) -> str:
        """OpenAI's reason: "tool_calls" where the model chose to call."""
        return "tool_calls" if called and reason == "stop" and not self.named else reason


def chat_format(services: Services, body: ChatCompletionRequest) -> ChatFormat:
    """How this request's output is read. InvalidRequest if tools and tool_choice disagree."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice != "none":
            raise InvalidRequest(
                "'tool_choice' is only allowed when 'tools' are given.",
                "tool_choice",
                "invalid_value",
            )
        return ChatFormat()
    if choice == "none":
        return ChatFormat()
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in body.tools]
        if choice.function.name not in names:
            raise InvalidRequest(
                f"'tool_choice' names {choice.function.name!r}, which is not in 'tools'.",
                "tool_choice",
                "invalid_value",
            )
    return ChatFormat(tools=tools, named=isinstance(choice, NamedToolChoice))
