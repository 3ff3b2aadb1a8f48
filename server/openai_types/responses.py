"""The body of /v1/responses, and how it reads as a chat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .common import INT32, INT64, Body, Content, Integer


class InputItem(Body):
    """A message, a call the model made, its result, or reasoning of an earlier turn."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class FunctionTool(Body):
    """A function the model may call; flat, unlike in chats."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """Forces one function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """`text.format`; flat, unlike `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(Body):
    """`reasoning`."""

    effort: str | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`. Nothing is stored, so a turn must bring its whole conversation."""

    model: str = Field(max_length=1024)
    input: str | list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, le=INT32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=INT32)
    seed: Integer | None = Field(None, ge=-INT64 - 1, le=INT64)
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None

    def chat(self) -> dict[str, Any]:
        """The same wish as the body of a chat completion."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tool_choice": self.tool_choice,
            **{name: getattr(self, name) for name in _SHARED},
        }
        if isinstance(self.tool_choice, NamedFunction):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.tools is not None:
            body["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ]
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
            if messages and messages[-1]["role"] == "assistant":  # calls follow their message
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": item.role, "content": _plain(item.content)})


_SHARED = ("temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls", "user")
# The chat's names of what is called otherwise here, for errors.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def _plain(content: Content | None) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": part.content} for part in content]
    return content
