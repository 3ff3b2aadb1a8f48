"""Rewrites the choices in a schema: `enum`, `const`, `anyOf`, `oneOf` and `allOf`.

The compiler reads only one of these and ignores the keywords beside it, so those move into the
branches. It treats `oneOf` as `anyOf`, which is correct only if no value satisfies two branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .numbers import listed
from .one_of import make_exclusive
from .shape import KNOWN, TYPES, Context, Schema, SchemaError

_CHOOSERS = ("enum", "const", "anyOf", "oneOf", "allOf")


def unwrap_all_of_one(schema: Schema, context: Context) -> None:
    """Replace an `allOf` of a single schema by that schema's keywords, in place."""
    while len(schema.get("allOf", ())) == 1:
        context.budget.spend(1)
        branch = schema.pop("allOf")[0]
        if branch is False:
            raise SchemaError("no value satisfies the schema false")
        if branch is not True:
            merged = _merged(dict(schema), branch, context)
            schema.update({name: value for name, value in merged.items() if name in KNOWN})


def choose(schema: Schema, context: Context) -> None:
    """Leave the schema with one choice at most, and an `anyOf` with no keyword beside it.

    Raises SchemaError if no branch can be satisfied, and, if strict, for combinations that cannot
    be enforced."""
    choosers = [name for name in _CHOOSERS if name in schema]
    if len(choosers) > 1:
        context.refuse(schema, set(choosers[1:]), f"cannot be enforced beside {choosers[0]!r}")
    chooser = choosers[0] if choosers else ""
    if chooser == "allOf":
        context.refuse(schema, {"allOf"}, "can be enforced only with a single schema")
    if chooser not in ("anyOf", "oneOf"):
        return
    given = schema.pop(chooser)
    shared = dict(schema)
    schema.clear()
    branches = [_merged(shared, branch, context) for branch in given]
    left = [branch for branch in branches if not _is_unsatisfiable(branch, context)]
    if not left:
        raise SchemaError(f"no value satisfies any schema of {chooser!r}")
    schema["anyOf"] = make_exclusive(left, context) if chooser == "oneOf" else left


def _merged(shared: Schema, branch: Any, context: Context) -> Any:
    """One schema with a branch's keywords and the `shared` ones, which were beside the choice."""
    if not shared or branch is False:
        return branch
    if branch is True:
        return dict(shared)
    context.budget.spend(len(shared) + len(branch) + len(shared.get("properties", ())) // 8)
    dependent = _dependent_keyword(shared, branch) or _dependent_keyword(branch, shared)
    if dependent and context.strict:
        raise SchemaError(
            f"{dependent!r} cannot be enforced apart from the keywords that it depends on: one of "
            "them is beside a choice, the other inside"
        )
    merged = {**shared, **branch}
    for name in shared.keys() & branch.keys():
        ours, theirs = shared[name], branch[name]
        if name in ("required", "properties"):
            context.budget.spend(len(ours) + len(theirs))
        if name == "required":
            merged[name] = list(dict.fromkeys([*ours, *theirs]))
        elif name == "properties" and not ours.keys() & theirs.keys():
            merged[name] = {**ours, **theirs}
        elif name in KNOWN and context.strict and ours != theirs:
            raise SchemaError(f"{name!r} cannot be enforced both beside and inside a choice")
    return merged


def _dependent_keyword(ours: Schema, theirs: Schema) -> str | None:
    """A keyword in `ours` that would change its meaning when merged with `theirs`, or None.

    For example, `additionalProperties` depends on the `properties` of its own schema."""
    if ours.get("additionalProperties", True) not in (True, {}):
        foreign = theirs.get("properties", {}).keys() - ours.get("properties", {}).keys()
        if foreign or theirs.get("patternProperties"):
            return "additionalProperties"
    items = ours.get("items", True)
    if isinstance(items, list) and theirs.keys() & {"items", "prefixItems", "additionalItems"}:
        return "items"
    if items not in (True, {}) and len(theirs.get("prefixItems", ())) > len(
        ours.get("prefixItems", ())
    ):
        return "items"
    return None


def _is_unsatisfiable(branch: Any, context: Context) -> bool:
    """Whether a branch is false, or lists only values that contradict its own `type`."""
    if not isinstance(branch, dict):
        return branch is False
    name = "enum" if "enum" in branch else "const" if "const" in branch else None
    return name is not None and not _fitting(branch, name, context)


def _fitting(schema: Schema, name: str, context: Context) -> list[Any]:
    """The values that the schema lists under `name` and whose type its `type` allows."""
    values = schema["enum"] if name == "enum" else [schema["const"]]
    context.budget.spend(len(values))
    kinds = schema.get("type", TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for kind in kinds:
        if kind not in _IS:
            raise SchemaError(f"{kind!r} is not a type")
    return [v for v in values if any(_IS[kind](v) for kind in kinds)]


def filter_values(schema: Schema, context: Context) -> bool:
    """Reduce a schema with `enum` or `const` to the listed values of the right type, in place.

    Returns False if the schema lists no values. Raises SchemaError if none has the right type, and,
    if strict, for other keywords beside the list.
    """
    name = next((name for name in ("enum", "const") if name in schema), None)
    if name is None:
        return False
    values = _fitting(schema, name, context)
    beside = schema.keys() - {name, "type"}
    if beside:
        context.refuse(schema, beside, f"cannot be enforced beside {name!r}")
    if not values:
        raise SchemaError(f"no value of {name!r} has the type that the schema requires")
    schema.clear()
    schema.update(listed(values, context))
    return True


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
