"""Prepares JSON schemas for the grammar compiler, which passes over what it cannot express.

What can be said in other words is rewritten, always to a schema that admits no more than the given
one; what cannot be enforced is refused, or, where the client asked for no guarantee, left out.
Schemas are taken apart with a stack of our own: clients choose their depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 200

_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$id", "$schema", "$defs", "definitions", "$anchor", "strict"),
    *("discriminator", "contentEncoding", "contentMediaType", "nullable", "x-order"),
}
_UNENFORCED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "uniqueItems", "$dynamicRef", "$recursiveRef"),
}
_TYPE_OF = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"
    ),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "required", "patternProperties"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
_DATE = (
    "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# The compiler takes any day and year 0, which no calendar has.
_DATES = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
_CHOOSERS = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems")


class SchemaError(ValueError):
    """A schema that cannot be enforced, or that nothing satisfies; one sentence."""


def check_shape(schema: Any) -> None:
    """SchemaError where a schema's keywords have values of a kind that no schema allows there.

    What reads schemas, here and in the tool parsers, may then take them apart without looking.
    """
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        part, depth = stack.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise SchemaError("a schema must be an object or a boolean")
        if depth > MAX_DEPTH:
            raise SchemaError(f"it is nested more than {MAX_DEPTH} deep")
        for name, value in part.items():
            stack.extend((below, depth + 1) for below in _below(name, value))


def _below(name: str, value: Any) -> list[Any]:
    """The schemas that a keyword holds."""
    if name in _MAPS:
        if not isinstance(value, dict):
            raise SchemaError(f"{name!r} must be an object")
        return list(value.values())
    if name in _LISTS or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise SchemaError(f"{name!r} must be a list")
        return list(value)
    if name in _SINGLE:
        return [value]
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    wrong = (
        (name == "required" and not strings)
        or (name == "enum" and not isinstance(value, list))
        or (name == "type" and not strings and not isinstance(value, str))
        or (name in ("$ref", "pattern", "format") and not isinstance(value, str))
    )
    if wrong:
        raise SchemaError(f"{name!r} has a value of a wrong kind")
    return []


def prepare_schema(schema: Schema | bool, strict: bool) -> Schema | bool:
    """The schema as the compiler can enforce it. SchemaError if it cannot, or nothing fits it.

    Without `strict`, what cannot be enforced is left out.
    """
    check_shape(schema)
    if schema is False:
        raise SchemaError("no value satisfies the schema false")
    if schema is True:
        return schema
    root: dict[str, Any] = {"": schema}
    stack: list[tuple[Any, Any, int]] = [(root, "", 0)]  # container, key, depth
    while stack:
        container, key, depth = stack.pop()
        if not isinstance(container[key], dict):
            continue
        if depth > MAX_DEPTH:
            raise SchemaError(f"it is nested more than {MAX_DEPTH} deep")
        rewritten = container[key] = _rewritten(container[key], strict)
        stack.extend((*place, depth + 1) for place in _places(rewritten))
    prepared: Schema = root[""]
    return prepared


def _places(schema: Schema) -> Iterator[tuple[Any, Any]]:
    """Where the schemas directly below are; containers are copies, so that they may be changed."""
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            schema[name] = dict(schema[name])
            yield from ((schema[name], key) for key in schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = list(schema[name])
            yield from ((schema[name], index) for index in range(len(schema[name])))
    yield from ((schema, name) for name in _SINGLE if isinstance(schema.get(name), dict))


def _rewritten(given: Schema, strict: bool) -> Schema:
    schema = dict(given)
    _unwrap_all_of_one(schema, strict)
    for rewrite in (_drop_unenforced, _merge_choosers, _filter_enum, _infer_type, _open_objects):
        rewrite(schema, strict)
    _spell_dates(schema)
    return schema


def _unwrap_all_of_one(schema: Schema, strict: bool) -> None:
    """What stands in an allOf of one is said beside it, where everything else looks."""
    while isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
        branch = schema.pop("allOf")[0]
        if branch is False:
            raise SchemaError("no value satisfies the schema false")
        if branch is not True:
            shared = {name: value for name, value in schema.items() if name not in _NOTES}
            schema.update(_merged(shared, branch, strict))


def _refuse(schema: Schema, names: set[str], why: str, strict: bool) -> None:
    if strict:
        raise SchemaError(f"{' and '.join(map(repr, sorted(names)))} {why}")
    for name in names:
        del schema[name]


def _drop_unenforced(schema: Schema, strict: bool) -> None:
    found = {name for name in _UNENFORCED & schema.keys() if schema[name] is not False}
    if found:
        _refuse(schema, found, "cannot be enforced", strict)
    target = schema.get("$ref", "#")
    if target != "#" and not target.startswith("#/"):  # check_shape has seen that it is text
        _refuse(schema, {"$ref"}, f"leads out of this schema, to {target[:100]!r}", strict)
    lengths = {"minLength", "maxLength"} & schema.keys()
    shape = {"pattern", "format"} & schema.keys()
    if lengths and shape:
        why = f"cannot be enforced together with {sorted(shape)[0]!r}"
        _refuse(schema, lengths, why, strict)


def _merge_choosers(schema: Schema, strict: bool) -> None:
    """The compiler looks at one chooser alone: move what stands beside it into the branches."""
    choosers = [name for name in _CHOOSERS if name in schema]
    beside = schema.keys() - _NOTES - set(choosers)
    if len(choosers) > 1:
        _refuse(schema, set(choosers[1:]), f"cannot be enforced beside {choosers[0]!r}", strict)
    chooser = choosers[0] if choosers else ""
    if chooser == "allOf":
        _refuse(schema, {"allOf"}, "can be enforced with one schema only", strict)
    elif chooser in ("anyOf", "oneOf") and isinstance(schema[chooser], list):
        shared = {name: schema.pop(name) for name in beside}
        branches = [_merged(shared, branch, strict) for branch in schema[chooser]]
        schema[chooser] = [branch for branch in branches if not _is_void(branch)]
        if branches and not schema[chooser]:
            raise SchemaError(f"nothing satisfies any schema of {chooser!r}")
    elif chooser == "$ref" and beside:
        _refuse(schema, beside, "cannot be enforced beside '$ref'", strict)


def _merged(shared: Schema, branch: Any, strict: bool) -> Any:
    """A branch and what stood beside it, as one schema."""
    if branch is True:
        return shared or True
    if not isinstance(branch, dict):
        return branch
    merged = {**shared, **branch}
    for name in shared.keys() & branch.keys() - _NOTES:
        ours, theirs = shared[name], branch[name]
        if ours == theirs:
            continue
        if name == "required" and isinstance(ours, list) and isinstance(theirs, list):
            merged[name] = [*ours, *(key for key in theirs if key not in ours)]
        elif name == "properties" and not ours.keys() & theirs.keys():
            merged[name] = {**ours, **theirs}
        elif strict:
            raise SchemaError(f"{name!r} cannot be enforced both beside and inside a choice")
    return merged


def _is_void(branch: Any) -> bool:
    """Whether its listed values are all of another type than it asks for."""
    try:
        _filter_enum(dict(branch) if isinstance(branch, dict) else {}, strict=False)
    except SchemaError:
        return True
    return branch is False


def _filter_enum(schema: Schema, strict: bool) -> None:
    """Of listed values keep those of the right type; other limits on them are not looked at."""
    name = next((name for name in ("enum", "const") if name in schema), None)
    if name is None or (name == "enum" and not isinstance(schema["enum"], list)):
        return
    values = schema["enum"] if name == "enum" else [schema["const"]]
    if "type" in schema:
        kinds = schema.pop("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not all(kind in _IS for kind in kinds if isinstance(kind, str)):
            raise SchemaError(f"{kinds[0]!r} is no type")
        values = [v for v in values if any(_IS[k](v) for k in kinds if isinstance(k, str))]
    if not values:
        raise SchemaError(f"no value of {name!r} has the type that the schema asks for")
    if name == "enum":
        schema["enum"] = values
    beside = schema.keys() - _NOTES - {name}
    if beside:
        _refuse(schema, beside, f"cannot be enforced beside {name!r}", strict)


_IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    ),
}


def _infer_type(schema: Schema, strict: bool) -> None:
    """A limit without a type binds that type alone; the compiler would pass over it."""
    if "type" in schema or any(name in schema for name in _CHOOSERS):
        return
    kind = next((_TYPE_OF[name] for name in schema if name in _TYPE_OF), None)
    if kind is not None:
        schema["type"] = kind


def _spell_dates(schema: Schema) -> None:
    """Days that exist, of the years 1000 to 9999, but no leap days; times without leap seconds."""
    pattern = _DATES.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None and "pattern" not in schema:
        del schema["format"]
        schema["pattern"] = f"^{pattern}$"


def _open_objects(schema: Schema, strict: bool) -> None:
    """Objects admit what they list and no more, except where counts or names ask for more."""
    if not {"minProperties", "maxProperties"}.isdisjoint(schema):
        schema.setdefault("additionalProperties", True)
    required, properties = schema.get("required"), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return
    missing = [name for name in required if isinstance(name, str) and name not in properties]
    if not missing:
        return
    others = schema.get("additionalProperties", True)
    if others is False and "patternProperties" not in schema:
        raise SchemaError(f"{missing[0]!r} is required, but no such property is allowed")
    named = others if isinstance(others, dict) else {}
    schema["properties"] = {**properties, **dict.fromkeys(missing, named)}
