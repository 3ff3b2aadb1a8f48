"""The body of /v1/responses, and its conversion to the body of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .common import INT32, INT64, MAX_CACHE_SALT, Body, Content, Integer, Many, Metadata, SizedBody


class InputItem(Body):
    """An item of `input`: a message, a function call, its result, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        missing = [name for name in _NEEDED[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type!r} needs {missing[0]!r}")
        return self


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class FunctionTool(Body):
    """A function that the model may call; its fields are not nested as in chats."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """A `tool_choice` that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[NamedFunction] = Field(min_length=1)


class TextFormat(Body):
    """`text.format`; its fields are not nested as in a chat's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_present(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("'schema' is required when type is 'json_schema'")
        return self


class TextOptions(Body):
    """`text`: output format and verbosity."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """`reasoning`: effort and summary."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SizedBody):
    """The body of `POST /v1/responses`.

    Nothing is stored, so each request must contain the whole conversation.
    """

    model: str = Field(max_length=1024)
    input: str | Many[InputItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, le=INT32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=INT32)
    seed: Integer | None = Field(None, ge=-INT64 - 1, le=INT64)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: Many[FunctionTool] | None = Field(None, max_length=1024)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    max_tool_calls: Integer | None = Field(None, ge=1, le=INT32)
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)
    truncation: Literal["auto", "disabled"] | None = None
    include: Many[str] | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=INT32)
    prompt: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None

    @property
    def has_schema(self) -> bool:
        return bool(self.tools) or (self.text is not None and self.text.format is not None)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply must contain the log probabilities of its tokens."""
        return "message.output_text.logprobs" in (self.include or ())

    def chat(self) -> dict[str, Any]:
        """The same request as the body of a chat completion."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tool_choice": self.tool_choice,
            **{name: getattr(self, name) for name in _SHARED},
        }
        if isinstance(self.tool_choice, NamedFunction):
            body["tool_choice"] = _nested(self.tool_choice.model_dump())
        elif isinstance(self.tool_choice, AllowedTools):
            allowed = [_nested(tool.model_dump()) for tool in self.tool_choice.tools]
            choice = {"mode": self.tool_choice.mode, "tools": allowed}
            body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice}
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.truncation == "auto":  # as in vLLM: the start of a long prompt is cut off
            body["truncate_prompt_tokens"] = -1
        if self.tools is not None:
            body["tools"] = [_nested(tool.model_dump()) for tool in self.tools]
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(exclude_none=True, by_alias=True)
            kind = form.pop("type")
            body["response_format"] = {"type": kind}
            if kind == "json_schema":
                body["response_format"]["json_schema"] = form
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return body

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            self._add(messages, item)
        return messages

    @staticmethod
    def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
        if item.type == "reasoning":
            return
        if item.type == "function_call_output":
            output = _plain(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":  # its calls
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": item.role, "content": _plain(item.content)})


_SHARED = (
    *("temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls", "user"),
    "cache_salt",
)
# Names of chat parameters and of their equivalents here, for error messages.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in flat.items() if k != "type"}}


def _plain(content: Content | None) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": part.content} for part in content]
    return content
