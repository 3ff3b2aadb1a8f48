"""Proves that no generated value satisfies two branches of a `oneOf`, or makes them exclusive.

The compiler generates a value from one branch; for example, an object has no additional properties
unless the branch mentions them. That value must not satisfy another branch as the client wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from .shape import KNOWN, TYPE_OF, TYPES, Context, Schema, SchemaError

_MAX_BRANCHES = 64
_WHY = "cannot be enforced, because a value may satisfy several of its schemas"


@dataclass
class _Facts:
    """What is known about the values of a branch."""

    kinds: set[str]  # types of the values that satisfy the branch
    made: set[str]  # types of the values generated from it; without `type`, that of its limits
    values: set[bytes] | None = None  # all values as JSON, if the branch lists them
    fixed: dict[str, set[bytes]] = field(default_factory=dict)  # property -> its listed values
    required: set[str] = field(default_factory=set)
    names: set[str] | None = None  # all properties that may appear; None if any may
    low: float = float("-inf")
    high: float = float("inf")


def make_exclusive(branches: list[Any], context: Context) -> list[Any]:
    """The branches, changed if needed so that no generated value satisfies two of them.

    Raises SchemaError, if strict, where this cannot be proved."""
    if len(branches) == 1 or not context.strict:
        return branches
    resolved = [_resolved(branch, context) for branch in branches]
    facts = [None if each is None else _facts(each, context) for each in resolved]
    if any(each is None for each in facts):
        raise SchemaError(f"'oneOf' {_WHY}")
    known = [each for each in facts if each is not None]
    name = _discriminator(known, context)
    if name is not None:
        return [
            branch if name in each.required else _requiring(inner, name)
            for branch, inner, each in zip(branches, resolved, known, strict=True)
        ]
    if len(known) > _MAX_BRANCHES:
        raise SchemaError(f"'oneOf' has more than {_MAX_BRANCHES} schemas without a discriminator")
    for number, ours in enumerate(known):
        context.budget.spend(number)
        if not all(
            _never_satisfies(ours, each) and _never_satisfies(each, ours) for each in known[:number]
        ):
            raise SchemaError(f"'oneOf' {_WHY}")
    return branches


def _requiring(schema: Any, name: str) -> Schema:
    assert isinstance(schema, dict)
    return {**schema, "required": [*schema.get("required", ()), name]}


def _resolved(branch: Any, context: Context) -> Schema | None:
    """The branch after following references and an `allOf` of one; None if it is another choice."""
    for _ in range(10):
        if not isinstance(branch, dict):
            return None
        context.budget.spend(1)
        alone = len(branch.keys() & KNOWN) == 1
        if "$ref" in branch and alone:
            branch = context.target(branch["$ref"])
        elif len(branch.get("allOf", ())) == 1 and alone:
            branch = branch["allOf"][0]
        else:
            chooses = branch.keys() & {"anyOf", "oneOf", "allOf", "$ref"}
            return None if chooses else branch
    return None


def _facts(schema: Schema, context: Context) -> _Facts:
    kinds = schema.get("type", TYPES)
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    inferred = next((TYPE_OF[name] for name in schema if name in TYPE_OF), None)
    facts = _Facts(kinds, {inferred} if "type" not in schema and inferred else kinds)
    facts.values = _values(schema, context)
    facts.required = set(schema.get("required", ()))
    properties = schema.get("properties", {})
    context.budget.spend(len(properties))
    for name, inner in properties.items():
        values = _values(inner, context) if isinstance(inner, dict) else None
        if values is not None:
            facts.fixed[name] = values
    others = {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
    others |= {"unevaluatedProperties"}
    if schema.get("additionalProperties", False) is False and not others & schema.keys():
        facts.names = {*properties, *facts.required}
    facts.low = schema.get("minimum", facts.low)
    facts.high = schema.get("maximum", facts.high)
    return facts


def _values(schema: Schema, context: Context) -> set[bytes] | None:
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    context.budget.spend(len(values))
    # Equal values of JSON Schema, such as 1 and 1.0, become the same text.
    return {msgspec.json.encode(_plain(value), order="deterministic") for value in values}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(v) for key, v in value.items()} if isinstance(value, dict) else value


def _discriminator(known: list[_Facts], context: Context) -> str | None:
    """A property whose listed values differ from branch to branch, or None."""
    for name in known[0].fixed:
        context.budget.spend(len(known))
        if not all(each.kinds == {"object"} and name in each.fixed for each in known):
            continue
        total = sum(len(each.fixed[name]) for each in known)
        if len(set().union(*(each.fixed[name] for each in known))) == total:
            return name
    return None


def _never_satisfies(ours: _Facts, theirs: _Facts) -> bool:
    """Whether provably no value generated from `ours` satisfies `theirs`."""
    if not _merge_integer(ours.made) & _merge_integer(theirs.kinds):
        return True
    if ours.values is not None and theirs.values is not None:
        return not ours.values & theirs.values
    if ours.values is not None:
        return not any(_kind(value) in _merge_integer(theirs.kinds) for value in ours.values)
    if theirs.values is not None:
        return not any(_kind(value) in _merge_integer(ours.made) for value in theirs.values)
    if ours.made <= {"integer", "number"}:
        return ours.high < theirs.low or theirs.high < ours.low
    if ours.made != {"object"}:
        return False
    fixed = ours.required & ours.fixed.keys() & theirs.fixed.keys()
    lacks_required = ours.names is not None and bool(theirs.required - ours.names)
    return lacks_required or any(not ours.fixed[n] & theirs.fixed[n] for n in fixed)


def _merge_integer(kinds: set[str]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in kinds}


def _kind(value: bytes) -> str:
    starts = {b'"': "string", b"[": "array", b"{": "object", b"t": "boolean", b"f": "boolean"}
    return "null" if value == b"null" else starts.get(value[:1], "number")
