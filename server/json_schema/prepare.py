"""Walks through a schema and rewrites each subschema; the other files contain the single steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .choices import choose, filter_values, unwrap_all_of_one
from .numbers import limit_number
from .objects import limit_object
from .sequences import limit_array, limit_string
from .shape import (
    CHOOSERS,
    KEYWORDS,
    KNOWN,
    LISTS,
    MAPS,
    MAX_DEPTH,
    SINGLE,
    TYPE_OF,
    TYPES,
    UNENFORCED,
    Budget,
    Context,
    Schema,
    SchemaError,
)

_LIMITS = {"array": limit_array, "object": limit_object, "string": limit_string}


def prepare_schema(
    schema: Schema | bool, strict: bool, budget: Budget | None = None, prefix: str = ""
) -> Schema | bool:
    """Rewrite a schema into one that the compiler enforces; the given one is not changed.

    Raises SchemaError if no value satisfies it, and, if `strict`, for keywords that cannot be
    enforced; without `strict` those are dropped. Annotations and unknown keywords are dropped, too.
    All schemas of a request may share a `budget` made by `Budget.of`, which checks their shape.
    Definitions end up in `$defs` under names that start with `prefix`.
    """
    budget = budget or Budget.of(schema)
    if schema is False:
        raise SchemaError("no value satisfies the schema false")
    if schema is True:
        return schema
    context = Context(schema, strict, budget, prefix)
    prepared: Any = _prepared(schema, context)
    definitions: Schema = {}
    while context.pending:
        name, given = context.pending.pop()
        definitions[name] = _prepared(given, context)
    if definitions:
        prepared["$defs"] = definitions
    return prepared  # type: ignore[no-any-return]


def _prepared(schema: Any, context: Context) -> Any:
    root: dict[str, Any] = {"": schema}
    stack: list[tuple[Any, Any, int]] = [(root, "", 0)]  # container, key, depth
    while stack:
        container, key, depth = stack.pop()
        if not isinstance(container[key], dict):
            continue
        if depth > MAX_DEPTH:
            raise SchemaError(f"it is nested more than {MAX_DEPTH} deep")
        rewritten, is_final = _rewritten(container[key], context)
        container[key] = rewritten
        if not is_final:
            stack.extend((*place, depth + 1) for place in _places(rewritten))
    return root[""]


def _places(schema: Schema) -> Iterator[tuple[Any, Any]]:
    """The (container, key) of each direct subschema; containers are copied first, to be changed."""
    for name in MAPS:
        if name in schema:
            schema[name] = dict(schema[name])
            yield from ((schema[name], key) for key in schema[name])
    for name in LISTS:
        if name in schema:
            schema[name] = list(schema[name])
            yield from ((schema[name], index) for index in range(len(schema[name])))
    yield from ((schema, name) for name in SINGLE if isinstance(schema.get(name), dict))


def _rewritten(given: Schema, context: Context) -> tuple[Schema, bool]:
    """A rewritten copy of one schema, and whether its subschemas are final already."""
    context.budget.spend(1 + len(given))
    schema = {name: value for name, value in given.items() if name in KNOWN}
    unwrap_all_of_one(schema, context)
    _drop_unenforced(schema, context)
    if _link(schema, context):
        return schema, True
    choose(schema, context)
    if filter_values(schema, context):
        return schema, True
    kinds = [] if "anyOf" in schema else _kinds(schema)
    if len(kinds) != 1:
        return schema if "anyOf" in schema else _by_type(schema, kinds), False
    schema["type"] = kind = kinds[0]
    of_kind = KEYWORDS.get("number" if kind == "integer" else kind, ())
    schema = {name: value for name, value in schema.items() if name == "type" or name in of_kind}
    if kind in ("number", "integer"):
        return limit_number(schema, context), True
    if kind in _LIMITS:
        _LIMITS[kind](schema, context)
    return schema, False


def _drop_unenforced(schema: Schema, context: Context) -> None:
    types = schema.get("type", TYPES)
    types = [types] if isinstance(types, str) else types
    found = {name for name in UNENFORCED & schema.keys() if schema[name] is not False}
    found = {name for name in found if name not in TYPE_OF or TYPE_OF[name] in types}
    if found:
        context.refuse(schema, found, "cannot be enforced")
    for name in UNENFORCED & schema.keys():
        del schema[name]


def _link(schema: Schema, context: Context) -> bool:
    """Point a reference to a definition of the prepared schema; False if it is not a reference."""
    if "$ref" not in schema:
        return False
    others = [name for name in CHOOSERS if name in schema and name != "$ref"]
    if others:
        context.refuse(schema, {"$ref"}, f"cannot be enforced beside {others[0]!r}")
        return False
    beside = schema.keys() - {"$ref"}
    if beside:
        context.refuse(schema, beside, "cannot be enforced beside '$ref'")
    schema["$ref"] = context.link(schema["$ref"])
    return True


def _kinds(schema: Schema) -> list[str]:
    """The types that a value may have; empty for any.

    A schema with a limit but no `type` gets the limit's type, because the compiler would ignore the
    limit otherwise. That allows fewer values than the schema, never more. Raises SchemaError for an
    unknown type."""
    given = schema.get("type")
    if given is None:
        kind = next((TYPE_OF[name] for name in schema if name in TYPE_OF), None)
        return [] if kind is None else [kind]
    kinds = list(dict.fromkeys([given] if isinstance(given, str) else given))
    unknown = [kind for kind in kinds if kind not in TYPES]
    if unknown or not kinds:
        raise SchemaError(f"{(unknown or [given])[0]!r} is not a JSON type")
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def _by_type(schema: Schema, kinds: list[str]) -> Schema:
    """A schema of several types (or any); if it has limits, an `anyOf` with one branch per type."""
    if schema.keys() <= {"type"}:
        return {"type": kinds} if kinds else {}
    branches = []
    for kind in kinds:
        of_kind = KEYWORDS.get("number" if kind == "integer" else kind, ())
        limits = {name: value for name, value in schema.items() if name in of_kind}
        branches.append({"type": kind, **limits})
    return {"anyOf": branches}
