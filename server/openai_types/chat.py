"""The body of /v1/chat/completions: messages, tools, tool_choice."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from .common import INT32, Body, Content, GenerationBody, Integer, Many


class FunctionCall(Body):
    """The function and arguments of a tool call in an earlier assistant message."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "latest_reminder"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    function_call: FunctionCall | None = None  # OpenAI's older form of tool_calls
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _has_parts(cls, content: Content | None) -> Content | None:
        if content == []:
            raise ValueError("expected a text or at least one part")
        return content

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "function"):
            raise ValueError(f"a message of role {self.role!r} needs 'content'")
        calls = self.tool_calls or self.function_call
        if calls and self.role != "assistant":
            raise ValueError("only assistant messages carry 'tool_calls'")
        if self.role == "assistant" and self.content is None and not calls:
            extra = self.model_extra or {}
            if self.reasoning_content is None and not extra.get("refusal"):
                raise ValueError("an assistant message needs 'content' or 'tool_calls'")
        return self


class FunctionDefinition(Body):
    """A function's name, description and parameters."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """Names one function: a forced `tool_choice`, or an entry of `allowed_tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The subset of the tools that may be called."""

    mode: Literal["auto", "required"]
    tools: Many[NamedToolChoice] = Field(min_length=1)


class AllowedToolsChoice(Body):
    """A `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class Thinking(Body):
    """DeepSeek's switch of reasoning; "auto" and "adaptive" leave it to the model's default."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatCompletionRequest(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Many[Message] = Field(min_length=1)
    max_tokens: Integer | None = Field(None, ge=1, le=INT32)
    max_completion_tokens: Integer | None = Field(None, ge=1, le=INT32)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=INT32)

    tools: Many[Tool] | None = Field(None, max_length=1024)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Many[FunctionDefinition] | None = Field(None, min_length=1, max_length=1024)
    function_call: Literal["none", "auto"] | FunctionName | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking: Thinking | None = None
    verbosity: str | None = None
    modalities: Many[Literal["text"]] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = None

    @property
    def has_schema(self) -> bool:
        """Whether the request contains tools, a schema, pattern or grammar."""
        return bool(self.tools or self.functions) or super().has_schema
