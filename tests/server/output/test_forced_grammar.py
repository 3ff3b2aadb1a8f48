"""The schema of forced calls, compiled and matched by the grammar library."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar as xgr

from slipstream.server.json_schema import SchemaError
from slipstream.server.tool_parsers.forced import ForcedToolParser, forced_grammar, strict_grammar

CITY = {"$ref": "#/$defs/city"}
WEATHER = {
    "type": "object",
    "properties": {"where": CITY, "more": {"type": "array", "items": CITY}},
    "required": ["where"],
    "additionalProperties": False,
    "$defs": {
        "city": {"type": "object", "properties": {"at": {"$ref": "#/$defs/name"}}},
        "name": {"type": "string"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ONE = '{"name": "now", "parameters": {}}'
TWO = '{"name": "weather", "parameters": {"where": {"at": "Köln"}}}'


def accepts(schema: str, text: str, kind: str = "json_schema") -> bool:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgr.TokenizerInfo(vocabulary, stop_token_ids=[256])  # type: ignore[arg-type]
    compiler = xgr.GrammarCompiler(info, max_threads=1)
    grammar = getattr(compiler, f"compile_{kind}")(schema)
    matcher = xgr.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(256)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (f"[{ONE}]", True),
        (f"[{TWO}, {ONE}]", True),
        ("[]", False),
        (ONE, False),
        ('[{"name": "other", "parameters": {}}]', False),
        ('[{"name": "weather", "parameters": {"where": {"at": 5}}}]', False),
        ('[{"name": "weather", "parameters": {}}]', False),
        ('[{"name": "now", "parameters": {"a": 1}}]', False),
    ],
)
def test_required_calls(text: str, valid: bool) -> None:
    spec = forced_grammar(TOOLS)
    assert spec.kind == "json_schema"
    assert accepts(spec.value, text) is valid
    if valid:
        parser = ForcedToolParser(tools=TOOLS)
        parser.push(text)
        assert parser.num_calls == len(json.loads(text))


def test_one_call_only_without_parallel_calls() -> None:
    schema = forced_grammar(TOOLS, parallel=False).value
    assert accepts(schema, f"[{ONE}]") and not accepts(schema, f"[{ONE}, {ONE}]")


def test_a_named_function_s_arguments() -> None:
    schema = forced_grammar(TOOLS, "weather").value
    assert json.loads(schema) == WEATHER
    assert accepts(schema, '{"where": {"at": "x"}}') and not accepts(schema, "{}")
    assert accepts(forced_grammar(TOOLS, "now").value, "{}")
    with pytest.raises(KeyError):
        forced_grammar(TOOLS, "other")


def test_definitions_of_two_tools_do_not_mix() -> None:
    other: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"$ref": "#/definitions/city"}},
        "definitions": {"city": {"type": "integer"}},
    }
    tools = [TOOLS[0], {"type": "function", "function": {"name": "b", "parameters": other}}]
    schema = json.loads(forced_grammar(tools).value)
    assert set(schema["$defs"]) == {"weather.city", "weather.name", "b.city"}
    text = '[{"name": "b", "parameters": {"city": 5}}]'
    assert accepts(json.dumps(schema), text)
    assert not accepts(json.dumps(schema), text.replace("5", '"5"'))
    assert "definitions" in other, "the caller's schema stays as it was"


STRICT = {
    "type": "function",
    "function": {"name": "weather", "parameters": WEATHER, "strict": True},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"where": {"at": "Köln"}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("No call, {[ <tool", True),
        (CALL, True),
        (f"Let me see. {CALL}{CALL} Done.", True),
        (CALL.replace("\n", ""), True),
        (CALL.replace('"Köln"', "5"), False),
        (CALL.replace('"where"', '"when"'), False),
        (CALL.replace("weather", "other"), False),
        ('<tool_call>{"name": "now", "arguments": {"any": ["thing"]}}</tool_call>', True),
        ("<tool_call>weather()", False),
    ],
)
def test_calls_of_strict_functions_fit_wherever_they_come(text: str, valid: bool) -> None:
    spec = strict_grammar([STRICT, TOOLS[1]])
    assert spec is not None and spec.kind == "structural_tag"
    assert accepts(spec.value, text, "structural_tag") is valid


def test_there_is_no_grammar_where_nothing_is_strict() -> None:
    assert strict_grammar(TOOLS) is None
    impossible = {"name": "f", "parameters": {"not": {}}, "strict": True}
    with pytest.raises(SchemaError):
        strict_grammar([{"type": "function", "function": impossible}])
