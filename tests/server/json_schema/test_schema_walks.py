"""Every text that a prepared schema allows satisfies the client's schema, or it is refused.

An independent validator checks random texts of the compiled grammar.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from slipstream.server.json_schema import SchemaError, prepare_schema

from ..grammar_walks import byte_compiler, compiled_schema, walk

NUM_WALKS = 12
INT, STR = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def compiler() -> Any:
    return byte_compiler()


def an_object(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INT}, **more}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


def tagged(kind: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}, **properties}}


NUMBERS: list[Any] = [
    {"type": "integer", "multipleOf": 7},
    {"multipleOf": 7},
    {"type": "number", "multipleOf": 5},
    {"type": ["integer", "null"], "multipleOf": 3},
    {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 900},
    {"type": "integer", "multipleOf": 1.5},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    {"type": "number", "multipleOf": 0.1, "minimum": -1, "exclusiveMaximum": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-5},
    {"type": "number", "minimum": 1e20},
    {"type": "integer", "exclusiveMinimum": 2.5, "maximum": 40.5},
    {"type": "integer", "minimum": -1e30},
    {"enum": [0.1, 0.25, 1, "x", None, [0.1], 1.0, True]},
    {"enum": [2**63, 3]},
]
STRINGS: list[Any] = [
    {"type": "string", "minLength": 1},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "maxLength": 1000},
    *map(pattern, ["^é.$", "^[^a]{2}$", '^"$', r"^\\$", r'^["\\]{2}$', r"^\n$", "^a|b$"]),
    *map(pattern, ["(^a|b$)", "^[a-z]{0,200}$", r"^\D\W\S$", r"^[\^\-\]é]+$", "^[^-a]{3}$"]),
    *map(pattern, ["^(?:b[0-9]{1,6})?c$", "^(?:(a|b{1,3}|[0-9])){1,3}$", r"^\s$", "[[:alpha:]]"]),
    *map(pattern, [r"^[\x00-\x7f]{4}$", r"^\u{1F600}\S$", "^x{2,}y{3}?z??$", r"^\x01$", "^$"]),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "duration")),
    *({"type": "string", "format": name} for name in ("email", "hostname", "ipv4", "ipv6")),
    *({"type": "string", "format": name} for name in ("uuid", "json-pointer", "uri")),
    {"type": "string", "format": "relative-json-pointer"},
]
ARRAYS: list[Any] = [
    {"type": "array", "maxItems": 2},
    {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1}},
    {"type": "array", "prefixItems": [True, INT]},
    {"type": "array", "prefixItems": [INT, STR], "maxItems": 1},
    {"type": "array", "prefixItems": [INT, False], "items": STR},
    {"type": "array", "prefixItems": [INT, STR], "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [INT, STR], "minItems": 1, "items": False},
    {"type": "array", "prefixItems": [INT], "items": STR, "minItems": 3, "maxItems": 4},
    {"type": "array", "prefixItems": [INT], "minItems": 1},
    {"type": "array", "prefixItems": [INT], "minItems": 2, "maxItems": 2},
]
OBJECTS: list[Any] = [
    an_object(patternProperties={"^b": INT}),
    an_object(patternProperties={"a": INT}),
    an_object(patternProperties={"a$": True}, required=["ba"]),
    an_object(patternProperties={"^b": STR}, additionalProperties=INT, required=["bc", "z"]),
    {"type": "object", "patternProperties": {"^S_": STR, "^I_": INT}},
    {"type": "object", "propertyNames": {"enum": ["x", 1]}, "additionalProperties": INT},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "object", "propertyNames": {"pattern": "^x.$"}, "additionalProperties": INT},
    {"type": "object", "propertyNames": False},
    {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": False},
    {"type": "object", "properties": dict.fromkeys("abc", INT), "minProperties": 2},
    {"type": "object", "properties": dict.fromkeys("abcd", INT), "required": ["c"]}
    | {"maxProperties": 2},
    {"type": "object", "properties": {"a": False, "b": INT}},
    an_object(unevaluatedProperties=False),
    an_object(required=['é"\\', "\x01"]),
]
CHOICES: list[Any] = [
    {"oneOf": [{"minimum": 6, "type": "integer"}, {"maximum": 5, "type": "integer"}]},
    {"oneOf": [tagged("a", v=INT), tagged("b", v=STR)]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    | {"$defs": {"A": tagged("a", v={"$ref": "#"}), "B": tagged("b")}},
    {"oneOf": [an_object(required=["a"]), {"properties": {"b": INT}, "required": ["b"]}]}
    | {"type": "object"},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}, {"type": "null"}]},
    {"type": ["string", "integer"], "minimum": 3, "maxLength": 2},
    {"properties": {"a": {"$ref": "#/properties/b"}, "b": INT}, "type": "object"}
    | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT}},
    {"$ref": "#/$defs/l/anyOf/1", "$defs": {"l": {"anyOf": [STR, INT]}}},
]


@pytest.mark.parametrize("schema", [*NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *CHOICES])
def test_whatever_the_grammar_allows_satisfies_the_schema(compiler: Any, schema: Any) -> None:
    grammar = compiled_schema(compiler, prepare_schema(schema, strict=True))
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    rng = random.Random(1)
    for _ in range(NUM_WALKS):
        text = walk(grammar, rng)
        assert validator.is_valid(json.loads(text)), text


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of random keywords, some of them inside a choice."""
    leaf = [INT, {"type": "null"}, {"type": "boolean"}, {"enum": ["x", "y"]}, True]
    names = ["a", "b", "ab", "S_1"]
    small, some = rng.choice(leaf), {name: rng.choice(leaf) for name in names if rng.random() < 0.6}
    limits: dict[str, dict[str, Any]] = {
        "array": {"items": rng.choice([False, small, INT]), "prefixItems": [small, *some.values()]},
        "object": {"properties": some, "required": rng.sample(names, rng.randint(0, 2))}
        | {"additionalProperties": rng.choice([False, True, small])}
        | {"patternProperties": {rng.choice(["^S_", "b$", "a", "^c[0-9]{1,2}$"]): small}}
        | {"propertyNames": rng.choice([{"enum": ["a", "z"]}, {"maxLength": 1}, {"pattern": "b"}])},
        "integer": {"multipleOf": rng.choice([1, 2, 0.5, 1.5])},
    }
    kind = rng.choice(list(limits))
    size = {"array": "Items", "object": "Properties", "integer": "imum"}[kind]
    counts = {f"min{size}": rng.randint(0, 3), f"max{size}": rng.randint(1, 9)}
    kept = {key: value for key, value in (limits[kind] | counts).items() if rng.random() < 0.5}
    chooser = rng.choice(["", "", "anyOf", "oneOf", "allOf"])
    inside = {key: kept.pop(key) for key in list(kept) if chooser and rng.random() < 0.5}
    branches = [{"type": kind, **inside}, *([{"type": "null"}] if chooser != "allOf" else [])]
    return {"type": kind, **kept, **({chooser: branches} if chooser else {})}


@pytest.mark.parametrize("seed", range(8))
def test_random_schemas_are_enforced_or_refused(compiler: Any, seed: int) -> None:
    rng, enforced = random.Random(seed), 0
    for _ in range(25):
        schema = random_schema(rng)
        try:
            prepared = prepare_schema(schema, strict=True)
        except SchemaError:
            continue
        enforced += 1
        grammar = compiled_schema(compiler, prepared)
        validator = jsonschema_rs.Draft202012Validator(schema)
        for _ in range(3):
            text = walk(grammar, rng)
            assert validator.is_valid(json.loads(text)), (schema, text)
    assert enforced > 5


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "integer", "multipleOf": 7, "minimum": 100}, "'multipleOf'"),
        ({"type": "number", "multipleOf": 0.25}, "'multipleOf'"),
        ({"multipleOf": 2048}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10**6}, "'multipleOf'"),
        ({"type": "array", "items": {"multipleOf": 0.1}}, "'multipleOf'"),
        (an_object(patternProperties={"^a": STR}), "matches the property 'a'"),
        (an_object(patternProperties={"(x|a)+": STR}), "matches the property 'a'"),
        ({"type": "object", "patternProperties": {"^S": STR, "I$": INT}}, "and another one"),
        (an_object(minProperties=2), "'minProperties'"),
        (an_object(allOf=[{"additionalProperties": False}]), "'additionalProperties'"),
        (an_object(additionalProperties=STR, anyOf=[{"properties": {"b": INT}}]), "apart"),
        ({"prefixItems": [INT], "type": "array", "anyOf": [{"items": STR}]}, "'items'"),
        ({"items": False, "type": "array", "allOf": [{"prefixItems": [INT]}]}, "'items'"),
        (an_object(propertyNames={"minLength": 2}), "'propertyNames'"),
        ({"oneOf": [INT, {"type": "number"}]}, "'oneOf'"),
        (
            {"oneOf": [{"minimum": 3, "type": "integer"}, {"maximum": 5, "type": "integer"}]},
            "oneOf",
        ),
        ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "'oneOf'"),
        ({"oneOf": [an_object(required=["a"]), an_object()]}, "'oneOf'"),
        ({"oneOf": [{"properties": {"a": INT}, "required": ["a"]}, STR]}, "'oneOf'"),
        *((pattern(text), "'pattern'") for text in ("a^b", r"\bx", "(?=a)b", r"(a)\1", "(?i)a")),
        *((pattern(text), "'pattern'") for text in (r"\p{L}", "(" * 60 + ")" * 60, "a**", "[]")),
        ({"type": "string", "format": "iri"}, "'format'"),
    ],
)
def test_what_the_compiler_would_not_enforce_is_refused_if_strict(
    compiler: Any, schema: Any, word: str
) -> None:
    with pytest.raises(SchemaError, match=word):
        prepare_schema(schema, strict=True)
    grammar = compiled_schema(compiler, prepare_schema(schema, strict=False))
    json.loads(walk(grammar, random.Random(1)))
