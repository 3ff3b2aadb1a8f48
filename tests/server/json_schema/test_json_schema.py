"""Every rule of a schema is enforced or refused; checked with the grammar library itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.messages import GrammarSpec
from slipstream.server.errors import InvalidRequest
from slipstream.server.json_schema import SchemaError, check_shape, prepare_schema
from slipstream.server.output.grammars import json_schema_grammar
from slipstream.server.tool_parsers.forced import forced_grammar

INT, STR = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def backend() -> Iterator[GrammarPool]:
    vocabulary = [b"", *(bytes([byte]) for byte in range(1, 256))]
    backend = build_grammar_backend(vocabulary, "raw", [0], 256)
    yield backend
    backend.shutdown()


def accepts(backend: GrammarPool, schema: Any, text: str) -> bool:
    matcher = backend.compile(GrammarSpec("json_schema", json.dumps(schema))).result(timeout=60)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(0)


def an_object(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INT}, **more}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "multipleOf": 5}, "10", "3"),
        ({"minimum": 3, "maximum": 9}, "3", "2"),
        ({"minimum": 3}, "3", '"x"'),  # a limit implies its type: fewer values, never more
        ({"minLength": 3}, '"abc"', '"a"'),
        ({"pattern": "^a+$"}, '"aa"', '"b"'),
        ({"items": INT, "maxItems": 1}, "[1]", "[1, 2]"),
        ({"type": ["integer", "null"], "minimum": 3}, "null", "2"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, "1.5", "1"),
        ({"type": "string", "maxLength": 1}, '"é"', '"éé"'),
        ({"type": "string", "format": "date"}, '"2020-01-31"', '"2020-02-30"'),
        ({"format": "date"}, '"1999-11-30"', '"0000-11-30"'),
        ({"type": "array", "items": {"type": "string", "format": "date-time"}},
         '["2020-02-28T23:59:59.25+02:00"]', '["2020-02-28T23:59:60Z"]'),
        ({"type": ["string", "null"], "format": "time"}, '"23:59:59Z"', '"24:00:00Z"'),
        ({"enum": ["a", 1, None], "type": "string"}, '"a"', "1"),
        ({"enum": [1, 2.5, True], "type": "integer"}, "1", "true"),
        ({"const": "a", "type": ["string", "null"]}, '"a"', "null"),
        ({"type": "array", "prefixItems": [INT], "items": False}, "[1]", "[1, 2]"),
        ({"prefixItems": [INT], "minItems": 2}, '[1, "x"]', "[1]"),  # further items are needed
        ({"prefixItems": [INT], "minItems": 2, "maxItems": 3}, "[1, 2, null]", "[1, 2, 3, 4]"),
        (an_object(), '{"a": 1}', '{"b": 1}'),
        (an_object(required=["b"]), '{"a": 1, "b": [2]}', '{"a": 1}'),
        (an_object(required=["b"], additionalProperties=STR), '{"b": "x"}', '{"b": 1}'),
        (an_object(anyOf=[{"required": ["a"]}]), '{"a": 1}', "{}"),
        (an_object(minProperties=1), '{"z": 1}', "{}"),
        ({"anyOf": [{"const": "a"}, {"const": 1}], "type": "string"}, '"a"', "1"),
        ({"anyOf": [{"minimum": 3}, {"maximum": -3}], "type": "integer"}, "-4", "0"),
        ({"allOf": [{"minLength": 2}], "type": "string"}, '"ab"', '"a"'),
        ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": INT}, "default": 1}, "1", '"a"'),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"maximum": 5}}, "title": "N"}, "4", "6"),
        ({"type": "array", "items": {"anyOf": [{"minLength": 2}]}}, '["ab"]', '["a"]'),
        ({"type": "object", "properties": {"not": INT, "enum": STR}}, '{"not": 1}', '{"not": ""}'),
        ({"enum": [{"not": 1}]}, '{"not":1}', '{"not":2}'),
        ({"type": "array", "items": INT, "uniqueItems": False}, "[1, 1]", '["x"]'),
    ],
)  # fmt: skip
def test_a_prepared_schema_allows_no_more_than_the_given_one(
    backend: GrammarPool, schema: dict[str, Any], good: str, bad: str
) -> None:
    before = json.dumps(schema)
    for strict in (True, False):
        prepared = prepare_schema(schema, strict)
        assert accepts(backend, prepared, good)
        assert not accepts(backend, prepared, bad)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": STR}, "'not'"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
        ({"type": "array", "contains": INT}, "'contains'"),
        ({"if": STR, "then": {"minLength": 2}}, "'if' and 'then'"),
        (an_object(dependentRequired={"a": ["b"]}), "'dependentRequired'"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "'maxLength'"),
        ({"type": "string", "format": "date", "minLength": 3}, "'format'"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "'allOf'"),
        ({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": INT}}, "'minimum'"),
        ({"enum": ["a"], "maxLength": 3}, "'maxLength'"),
        ({"anyOf": [STR, INT], "enum": ["a"]}, "'anyOf'"),
        ({"type": "string", "minLength": 1, "anyOf": [{"minLength": 2}]}, "'minLength'"),
        ({"allOf": [{"not": STR}]}, "'not'"),
        ({"allOf": [{"allOf": [{"uniqueItems": True, "type": "array"}]}]}, "'uniqueItems'"),
        ({"type": "string", "pattern": "^a+$", "allOf": [{"maxLength": 3}]}, "'maxLength'"),
    ],
)
def test_unenforceable_keywords_are_refused_if_strict_and_dropped_otherwise(
    backend: GrammarPool, schema: dict[str, Any], word: str
) -> None:
    with pytest.raises(SchemaError, match=word):
        prepare_schema(schema, strict=True)
    spec = GrammarSpec("json_schema", json.dumps(prepare_schema(schema, strict=False)))
    assert backend.compile(spec).result(timeout=60) is not None


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": ["a"], "type": "integer"},
        {"const": None, "type": "string"},
        {"allOf": [False]},
        {"type": "string", "anyOf": [{"const": 1}, False]},
        {"type": "nothing", "const": 1},
        an_object(required=["b"], additionalProperties=False),
        {"minItems": 3, "maxItems": 2},
        {"type": "number", "minimum": 1e-8, "maximum": 2e-8},
        {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13},
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 0, "multipleOf": 1},
        an_object(required=["a"], maxProperties=0),
        an_object(additionalProperties=False, minProperties=2),
        {"type": "nothing"},
        {"const": 12345678901234567890},
    ],
)
def test_unsatisfiable_schemas_are_refused_even_if_not_strict(schema: Any) -> None:
    for strict in (True, False):
        with pytest.raises(SchemaError):
            prepare_schema(schema, strict)


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = INT
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="deep"):
        prepare_schema(schema, strict=True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://example.com/a.json"},
        {"$ref": "#/$defs/no"},
        {"$ref": "#/$defs/n/anyOf/1", "$defs": {"n": {"anyOf": [INT]}}},
        an_object(properties={"a": {"$ref": "b.json"}}),
        {"type": "array", "items": {"$ref": "#anchor"}},
        {"allOf": [{"$ref": "b.json"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#"},
    ],
)
def test_a_broken_reference_is_refused_even_if_not_strict(schema: Any, strict: bool) -> None:
    with pytest.raises(SchemaError, match=r"'\$ref'"):
        prepare_schema(schema, strict)


def repeated(levels: int) -> Any:
    """A schema whose keywords beside a choice go into both branches, at every level again."""
    schema: Any = {}
    for _ in range(levels):
        schema = {"anyOf": [{}, {}], "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        repeated(16),
        repeated(60),
        {"type": "object", "properties": {f"p{i}": {"maxLength": i} for i in range(20_000)}},
        {"enum": list(range(60_000))},
        {"type": "array", "prefixItems": [{"pattern": "(?:[^abc]|x){3}" * 500}] * 30},
        {"anyOf": [{"required": [f"r{i}"]} for i in range(1000)]}
        | {"properties": {f"p{i}": INT for i in range(1000)}},
    ],
)
def test_the_work_on_a_schema_is_bounded(schema: Any) -> None:
    began = time.process_time()
    with pytest.raises(SchemaError, match="too large"):
        prepare_schema(schema, strict=True)
    assert time.process_time() - began < 2  # without a budget, 16 levels took minutes


def test_a_few_repetitions_by_choices_fit_the_budget() -> None:
    prepared: Any = prepare_schema(repeated(4), strict=True)
    assert len(json.dumps(prepared)) < 4000


def test_a_reference_to_the_root_keeps_its_meaning_inside_another_schema() -> None:
    tree = an_object(properties={"next": {"$ref": "#"}}, additionalProperties=False)
    tool = {"function": {"name": "f", "parameters": tree}}
    schema = json.loads(forced_grammar([tool]).value)
    inner = schema["items"]["properties"]["parameters"]["properties"]["next"]
    assert inner == {"$ref": "#/$defs/f.schema"}
    assert schema["$defs"]["f.schema"]["properties"]["next"] == inner


def test_values_that_look_like_references_are_not_changed() -> None:
    value = {"$ref": "#/$defs/n"}
    schema = an_object(properties={"a": {"const": value}, "b": value}, **{"$defs": {"n": INT}})
    prepared: Any = prepare_schema(schema, True, prefix="f.")
    assert prepared["properties"] == {"a": {"enum": [value]}, "b": {"$ref": "#/$defs/f.n"}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no integer lies"),
        ({"type": "number", "minimum": 3, "maximum": 2}, "no number with up to six decimals lies"),
    ],
)
def test_limits_without_a_number_between_them_are_refused(
    schema: dict[str, Any], words: str
) -> None:
    for strict in (True, False):
        with pytest.raises(SchemaError, match=words):
            prepare_schema(schema, strict)


def test_the_error_and_the_grammar_name_the_parameter() -> None:
    with pytest.raises(InvalidRequest, match="'not' cannot be enforced") as caught:
        json_schema_grammar({"not": {}}, "guided_json")
    assert (caught.value.param, caught.value.status) == ("guided_json", 400)
    spec = json_schema_grammar('{"type": "null"}', "structured_outputs")
    assert spec == GrammarSpec("json_schema", '{"type":"null"}', "structured_outputs")
    tool = {"function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    with pytest.raises(SchemaError):
        forced_grammar([tool], "f")
    tool["function"]["strict"] = False
    assert forced_grammar([tool], "f").param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": -1},
        {"properties": {"a": 3}},
        {"$defs": 4},
        {"$defs": {"a": [1]}},
        {"required": 3},
        {"required": [1]},
        {"enum": 5},
        {"type": {"a": 1}},
        {"type": [1]},
        {"anyOf": {"a": 1}},
        {"anyOf": [3]},
        {"items": "x"},
        {"items": [None]},
        {"additionalProperties": 7},
        {"$ref": 5},
        {"pattern": 5},
        {"minLength": -1},
        {"maxItems": 1.5},
        {"minimum": "3"},
        {"multipleOf": 0},
        {"properties": {"a": {"properties": []}}},
        {"properties": {"a": {"allOf": [{"items": {"type": 3}}]}}},
        3,
    ],
)
def test_keywords_with_values_of_the_wrong_type_are_refused_everywhere(schema: Any) -> None:
    for strict in (True, False):
        with pytest.raises(SchemaError):
            prepare_schema(schema, strict)


def test_the_shape_check_accepts_valid_schemas() -> None:
    deep: Any = True
    for _ in range(100):
        deep = {"anyOf": [{"properties": {"a": deep}}, {"items": [{}, False]}], "x-note": [1]}
    check_shape(deep)
    check_shape({"items": {"type": ["string", "null"]}, "additionalProperties": False})
