"""Calls that the grammar forces (tool_choice "required" or a named function), and that grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...runner.messages import GrammarSpec
from ..json_schema import MAX_GRAMMAR_CHARS, Budget, SchemaError, prepare_schema
from .base import Wait
from .json_call import JsonToolParser


class ForcedToolParser(JsonToolParser):
    """Reads what `forced_grammar` lets the model write.

    With a name, the whole text is that call's arguments, else it is a list of call objects.
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
        """See the base."""
        raw = yield from self.take_space()
        first = yield from self.peek()
        if self._name is not None and first == "{":
            self.start_call(self._name)
            yield from self.json_object(self.arguments)
        elif self._name is None and first == "[":
            rest = yield from self.json_calls()
            if not self.num_calls:  # else it is a call that the output's end cut off
                self.content(rest or "")
        else:
            self.content(raw)


def forced_grammar(
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    parallel: bool = True,
    budget: Budget | None = None,
) -> GrammarSpec:
    """The grammar of an answer that is calls and nothing else.

    With `name` it is that function's arguments; else a list of `{"name": …, "parameters": {…}}`,
    of one call if not `parallel`. Raises KeyError if no tool has the name, SchemaError if a
    function's parameters cannot be enforced, though it is `strict`, or admit nothing.
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
    """A grammar's JSON text. SchemaError if the worker would refuse to compile so much."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise SchemaError(
            f"together they come to {len(text)} characters, at most {MAX_GRAMMAR_CHARS} can be "
            "compiled"
        )
    return text


def parameters_of(
    function: Mapping[str, Any], budget: Budget | None = None, prefix: str = ""
) -> dict[str, Any]:
    """A function's parameters as the grammar compiler can enforce them."""
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    given = dict(function.get("parameters") or empty)
    prepared = prepare_schema(given, function.get("strict") is True, budget, prefix)
    assert isinstance(prepared, dict)
    return prepared


def _call_schema(
    function: Mapping[str, Any], definitions: dict[str, Any], budget: Budget | None
) -> dict[str, Any]:
    """One call's schema; its definitions move to the common ones, under names of their own."""
    name = function["name"]
    parameters = parameters_of(function, budget, f"{name}.")
    definitions |= parameters.pop("$defs", {})
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
