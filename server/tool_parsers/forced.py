"""The grammars of forced calls (tool_choice "required" or a function) and of strict functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...runner.messages import GrammarSpec
from ..json_schema import MAX_GRAMMAR_CHARS, Budget, SchemaError, prepare_schema
from .base import Wait
from .hermes import BEGIN, END
from .json_call import JsonToolParser


class ForcedToolParser(JsonToolParser):
    """Parses the output that `forced_grammar` allows.

    With `name`, the whole text is the arguments of that function; without, a list of call objects.
    """

    def __init__(
        self,
        name: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._name = name
        super().__init__(tools, new_id)

    def run(self) -> Wait[None]:
        raw = yield from self.take_space()
        first = yield from self.peek()
        if self._name is not None and first == "{":
            self.start_call(self._name)
            yield from self.json_object(self.arguments)
        elif self._name is None and first == "[":
            rest = yield from self.json_calls()
            if not self.num_calls:  # otherwise the rest is a call that was cut off at the end
                self.content(rest or "")
        else:
            self.content(raw)


def forced_grammar(
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    parallel: bool = True,
    budget: Budget | None = None,
) -> GrammarSpec:
    """The grammar of a reply that consists only of calls.

    With `name`, it is that function's arguments; without, a list of
    `{"name": …, "parameters": {…}}`, with a single call if not `parallel`. Raises KeyError if no
    tool has the name, and SchemaError if no value satisfies a function's parameters or they cannot
    be enforced although the function is `strict`.
    """
    functions = {f["name"]: f for f in (tool.get("function") or tool for tool in tools)}
    if name is not None:
        return _spec(parameters_of(functions[name], budget))
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, definitions, budget) for function in functions.values()]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return _spec(schema)


def _spec(schema: Mapping[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", grammar_text(schema), "tools")


def grammar_text(value: Mapping[str, Any]) -> str:
    """The JSON text of a grammar; raises SchemaError if it is longer than the worker accepts."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise SchemaError(
            f"together they have {len(text)} characters; at most {MAX_GRAMMAR_CHARS} can be "
            "compiled"
        )
    return text


def parameters_of(
    function: Mapping[str, Any], budget: Budget | None = None, prefix: str = ""
) -> dict[str, Any]:
    """The schema of a function's parameters, prepared for the grammar compiler.

    Definitions get names that start with `prefix`. Raises SchemaError."""
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    given = dict(function.get("parameters") or empty)
    prepared = prepare_schema(given, function.get("strict") is True, budget, prefix)
    assert isinstance(prepared, dict)
    return prepared


def _call_schema(
    function: Mapping[str, Any], definitions: dict[str, Any], budget: Budget | None
) -> dict[str, Any]:
    """The schema of one call; its `$defs` move to `definitions`, under names of their own."""
    name = function["name"]
    parameters = parameters_of(function, budget, f"{name}.")
    definitions |= parameters.pop("$defs", {})
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def strict_grammar(
    tools: Sequence[Mapping[str, Any]], budget: Budget | None = None
) -> GrammarSpec | None:
    """The grammar for calls in the hermes format, or None if no function is `strict`.

    After the opening tag it allows only a call of a known function, with arguments that satisfy
    the function's parameters if it is `strict`. Raises SchemaError if they cannot be enforced.
    """
    functions = [tool.get("function") or tool for tool in tools]
    if not any(function.get("strict") is True for function in functions):
        return None
    tags = [tag for function in functions for tag in _tags(function, budget)]
    form = {"type": "triggered_tags", "triggers": [BEGIN], "tags": tags}
    wanted = {"type": "structural_tag", "format": form}
    return GrammarSpec("structural_tag", grammar_text(wanted), "tools")


def _tags(function: Mapping[str, Any], budget: Budget | None) -> list[dict[str, Any]]:
    strict = function.get("strict") is True
    schema = parameters_of(function, budget) if strict else {"type": "object"}
    name = json.dumps(function["name"])
    return [
        {
            "type": "tag",
            "begin": f'{BEGIN}{space}{{"name": {name}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": [f"}}{END}", f"}}\n{END}"],
        }
        for space in ("", "\n")
    ]
