"""Calls that the grammar forces (tool_choice "required" or a named function), and that grammar."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...runner.messages import GrammarSpec
from ..json_schema import prepare_schema
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
    tools: Sequence[Mapping[str, Any]], name: str | None = None, parallel: bool = True
) -> GrammarSpec:
    """The grammar of an answer that is calls and nothing else.

    With `name` it is that function's arguments; else a list of `{"name": …, "parameters": {…}}`,
    of one call if not `parallel`. Raises KeyError if no tool has the name, SchemaError if a
    function's parameters cannot be enforced, though it is `strict`, or admit nothing.
    """
    functions = {f["name"]: f for f in (tool.get("function") or tool for tool in tools)}
    if name is not None:
        return _spec(parameters_of(functions[name]))
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, definitions) for function in functions.values()]
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
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), "tools")


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's parameters as the grammar compiler can enforce them."""
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    given = copy.deepcopy(dict(function.get("parameters") or empty))
    prepared = prepare_schema(given, strict=function.get("strict") is True)
    assert isinstance(prepared, dict)
    return prepared


def _call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One call's schema; its definitions move to the common ones, under names of their own."""
    name, parameters = function["name"], parameters_of(function)
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, {})
        for local in own:
            _rename(parameters, f"#/{key}/{local}", f"#/$defs/{name}.{local}")
            for schema in own.values():
                _rename(schema, f"#/{key}/{local}", f"#/$defs/{name}.{local}")
        definitions |= {f"{name}.{local}": schema for local, schema in own.items()}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _rename(schema: Any, old: str, new: str) -> None:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == old or reference.startswith(old + "/")):
            schema["$ref"] = new + reference[len(old) :]
        for value in schema.values():
            _rename(value, old, new)
    elif isinstance(schema, list):
        for value in schema:
            _rename(value, old, new)
