"""The grammar of a reply with optional calls of strict functions: free text, enforced arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...runner.messages import GrammarSpec
from ..json_schema import Budget
from .forced import grammar_text, parameters_of
from .hermes import BEGIN, END


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
