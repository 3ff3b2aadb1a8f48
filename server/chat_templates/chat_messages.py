"""Finds out what form of messages a chat template expects, and converts messages to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from jinja2 import nodes

from ..json_text import MAX_DEPTH, too_deep, too_many

_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}


class UnsupportedContent(ValueError):
    def __init__(self, kind: object) -> None:
        super().__init__(f"The model reads text only, but a message has a part of type {kind!r}.")


class UnknownRole(ValueError):
    def __init__(self, role: str) -> None:
        super().__init__(f"The model knows no messages of role {role!r}.")


class TooLargeArguments(ValueError):
    def __init__(self, excess: str) -> None:
        super().__init__(f"The arguments of a tool call are too large: they have {excess}.")


@dataclass(frozen=True)
class TemplateTraits:
    """Properties of a template, as found in its syntax tree."""

    uses_tools: bool  # shows `tools` to the model
    loops_over_content: bool  # reads content as a list of parts
    tests_content_type: bool  # tests whether content is a string or a list
    tests_content_none: bool  # tests whether content is none
    knows_developer: bool  # mentions the role "developer"
    knows_function: bool = False  # compares a role with "function"
    knows_reminder: bool = False  # mentions the role "latest_reminder", as DeepSeek V4 has it

    @property
    def content_format(self) -> str:
        """The form of content that the template reads: "openai" (a list of parts) or "string"."""
        return "openai" if self.loops_over_content else "string"

    @classmethod
    def of(cls, tree: nodes.Template) -> TemplateTraits:
        aliases = _content_aliases(tree)
        tests = [t for t in tree.find_all(nodes.Test) if _is_content(t.node, aliases)]
        kinds = {test.name for test in tests}
        names = {name.name for name in tree.find_all(nodes.Name)}
        texts = {const.value for const in tree.find_all(nodes.Const)}
        return cls(
            uses_tools="tools" in names,
            loops_over_content=any(
                _is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For)
            ),
            tests_content_type=bool(kinds & {"string", "iterable", "sequence", "mapping"}),
            tests_content_none="none" in kinds,
            knows_developer="developer" in texts,
            knows_function=_compares_role(tree, "function"),
            knows_reminder="latest_reminder" in texts,
        )


def _compares_role(tree: nodes.Template, role: str) -> bool:
    """Whether the template compares a message's role with this one."""
    for compare in tree.find_all(nodes.Compare):
        if _is_role(compare.expr) and any(
            const.value == role
            for operand in compare.ops
            for const in (operand.expr, *operand.expr.find_all(nodes.Const))
            if isinstance(const, nodes.Const)
        ):
            return True
    return False


def _is_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Getattr) and node.attr == "role"


def _content_aliases(tree: nodes.Template) -> set[str]:
    """The names of variables and macro parameters that hold a message's content."""
    aliases: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            aliases.add(assign.target.name)
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        for parameter, value in zip(macro.args if macro else [], call.args, strict=False):
            if _is_content(value, aliases):
                aliases.add(parameter.name)
    return aliases


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    """Whether a node is `x.content`, `x["content"]`, an alias, or a filter or slice of these."""
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, aliases)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, aliases)
    return False


def prepare_messages(
    messages: Iterable[Mapping[str, Any]], traits: TemplateTraits
) -> list[dict[str, Any]]:
    """Copy messages into the form that the template reads.

    Raises UnsupportedContent, UnknownRole or TooLargeArguments."""
    return [_prepare(message, traits) for message in _with_tools(messages, traits)]


def _with_tools(
    messages: Iterable[Mapping[str, Any]], traits: TemplateTraits
) -> Iterator[Mapping[str, Any]]:
    """Convert old-style function calls and results to tool calls, which all templates know."""
    number = 0
    for message in messages:
        if call := message.get("function_call"):
            number += 1
            rest = {key: value for key, value in message.items() if key != "function_call"}
            named = {"id": _call_id(number), "type": "function", "function": call}
            yield {**rest, "tool_calls": [*(message.get("tool_calls") or ()), named]}
        elif message.get("role") == "function" and not traits.knows_function:
            yield {**message, "role": "tool", "tool_call_id": _call_id(number)}
        else:
            yield message


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine characters, as Mistral's templates demand


def _prepare(message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    plain: dict[str, Any] = {key: plain_copy(v) for key, v in message.items() if v is not None}
    if plain.get("role") == "latest_reminder" and not traits.knows_reminder:
        raise UnknownRole("latest_reminder")
    plain["content"] = _content(plain.get("content"), traits)
    if plain["content"] is None and not traits.tests_content_none:
        plain["content"] = ""
    if plain.get("role") == "developer" and not traits.knows_developer:
        plain["role"] = "system"
    for call in plain.get("tool_calls") or []:
        function = call.get("function", call)
        function["arguments"] = _arguments(function.get("arguments"))
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content(content: Any, traits: TemplateTraits) -> Any:
    if isinstance(content, list):
        texts = [_part_text(part) for part in content]
        if traits.loops_over_content:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)
    if isinstance(content, str) and traits.loops_over_content and not traits.tests_content_type:
        return [{"type": "text", "text": content}]
    return content


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise UnsupportedContent(kind)
    return str(part.get("refusal" if kind == "refusal" else "text", ""))


def _arguments(arguments: Any) -> Any:
    """Parse a tool call's arguments, which clients send as JSON text, to the object.

    Templates expect the object. Text that is not a JSON object is returned as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    data = (arguments or "{}").encode()
    if (excess := too_many(data)) is not None:
        raise TooLargeArguments(excess)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    if too_deep(data, value):
        raise TooLargeArguments(f"more than {MAX_DEPTH} levels")
    return value if isinstance(value, dict) else arguments


def plain_copy(value: Any) -> Any:
    """Copy JSON data into exact built-in types, so that a template cannot call methods of ours."""
    if isinstance(value, Mapping):
        return {str(key): plain_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item) for item in value]
    return value


def with_tools_prompt(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Describe the tools in the system message, for a template that does not show tools.

    The model is told to call them in the hermes format. Calls and results of earlier turns are
    converted to text, too.
    """
    listed = "\n".join(json.dumps(plain_copy(tool), ensure_ascii=False) for tool in tools)
    prompt = (
        "You can call the functions below. To call one, answer with a JSON object of its name and "
        "its arguments between <tool_call> and </tool_call>, one pair of tags for each call:\n"
        '<tool_call>{"name": "function_name", "arguments": {}}</tool_call>\n'
        f"Functions:\n{listed}"
    )
    chat = [_as_text(message) for message in messages]
    if chat[0].get("role") == "system":
        return [{**chat[0], "content": _joined(chat[0]["content"], prompt)}, *chat[1:]]
    return [{"role": "system", "content": prompt}, *chat]


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": "\n\n" + text}]
    return f"{content}\n\n{text}" if content else text


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its tool calls, or its tool result, as text in a plain role."""
    if message.get("role") == "tool":
        return {"role": "user", "content": _tagged("tool_response", message["content"])}
    text = message["content"]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        shown = {"name": function.get("name"), "arguments": function["arguments"]}
        body = json.dumps(shown, ensure_ascii=False)
        text = _joined(text, f"<tool_call>{body}</tool_call>")
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}


def _tagged(tag: str, content: Any) -> Any:
    if isinstance(content, list):
        start, end = {"type": "text", "text": f"<{tag}>"}, {"type": "text", "text": f"</{tag}>"}
        return [start, *content, end]
    return f"<{tag}>{content}</{tag}>"
