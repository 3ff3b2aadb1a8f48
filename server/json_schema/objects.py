"""Rewrites the limits of objects into forms that the compiler enforces.

The compiler generates the listed properties in order, then any additional ones. It does not check
whether an additional property's name matches a pattern, repeats an earlier name, or is an escaped
spelling of a listed one.
"""

from __future__ import annotations

from typing import Any

from .regex_syntax import HalfSurrogate, RegexError
from .regex_text import are_apart, json_pattern, may_match
from .sequences import clamp_counts
from .shape import KNOWN, Context, Schema, SchemaError, pattern_weight

_NAME_KEYWORDS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}


def limit_object(schema: Schema, context: Context) -> None:
    """Rewrite a schema of type object in place.

    The result allows only the listed properties, unless the schema explicitly wants others or needs
    them for its counts. Raises SchemaError if no object satisfies it, and, if strict, for keywords
    that cannot be enforced."""
    clamp_counts(schema, "Properties", context)
    others = schema.pop("unevaluatedProperties", None)
    if others is not None:
        schema.setdefault("additionalProperties", others)
    if schema.get("patternProperties") == {}:
        del schema["patternProperties"]
    _limit_names(schema, context)
    _list_required(schema, context)
    _limit_patterns(schema, context)
    _count_properties(schema, context)
    _rewrite_patterns(schema, context)
    _drop_impossible(schema, context)


def _limit_names(schema: Schema, context: Context) -> None:
    """Enforce `propertyNames`: names in an enum become properties, other rules are kept.

    They can be kept only if the schema lists no properties."""
    names = schema.pop("propertyNames", True)
    if isinstance(names, dict) and "$ref" in names and len(names.keys() & KNOWN) == 1:
        names = context.target(names["$ref"])
    if names is True or names == {}:
        return
    if names is False:
        names = {"enum": []}
    known = {name: value for name, value in names.items() if name in KNOWN}
    wrong = not known.keys() <= _NAME_KEYWORDS or known.get("type", "string") != "string"
    fixed = "enum" in known or "const" in known
    if wrong or (schema.keys() & ({"patternProperties"} if fixed else _LISTING_KEYWORDS)):
        schema["propertyNames"] = names
        context.refuse(schema, {"propertyNames"}, "cannot be enforced here")
    elif not fixed and schema.get("additionalProperties", True) is False:
        return  # no property is allowed, so there are no names to check
    elif not fixed:
        schema["propertyNames"] = {**known, "type": "string"}
    else:
        listed = known["enum"] if "enum" in known else [known["const"]]
        _list_names(schema, [name for name in listed if isinstance(name, str)], context)


_LISTING_KEYWORDS = {"properties", "patternProperties", "required"}


def _list_names(schema: Schema, names: list[str], context: Context) -> None:
    context.budget.spend(len(names))
    given, allowed = schema.get("properties", {}), dict.fromkeys(names)
    others = schema.get("additionalProperties", True)
    found = {name: value for name, value in given.items() if name in allowed}
    if others is not False:
        found |= {name: others for name in allowed if name not in found}
    schema["properties"], schema["additionalProperties"] = found, False


def _limit_patterns(schema: Schema, context: Context) -> None:
    """Keep the `patternProperties` that no name can confuse.

    A pattern must not match a listed property with a different schema, nor share a name with a
    pattern of a different schema. Others are an error if strict, else dropped."""
    given = schema.get("patternProperties")
    if given is None:
        return
    properties = schema.get("properties", {})
    kept: dict[str, Any] = {}
    wrong = ""
    for pattern, inner in given.items():
        clash = next(
            (
                name
                for name, other in properties.items()
                if other != inner and may_match(pattern, name, context.budget)
            ),
            None,
        )
        context.budget.spend(len(kept))
        if clash is not None and inner in (True, {}):
            continue  # the pattern demands nothing, so the listed property needs no second rule
        if clash is not None:
            wrong = f"the pattern {pattern[:60]!r} also matches the property {clash[:60]!r}"
        elif not all(other == inner or are_apart(pattern, each) for each, other in kept.items()):
            wrong = f"a name may match both the pattern {pattern[:60]!r} and another one"
        else:
            kept[pattern] = inner
            continue
        if context.strict:
            raise SchemaError(f"'patternProperties' cannot be enforced, because {wrong}")
    schema["patternProperties"] = kept


def _count_properties(schema: Schema, context: Context) -> None:
    """Enforce `minProperties` and `maxProperties` as far as the compiler can.

    It may repeat the name of an additional property, so the only distinct names that are certain
    are the required ones and one more."""
    least = schema.get("minProperties", 0)
    sure = len(set(schema.get("required", ())))
    if schema.get("maxProperties", sure) < sure:
        raise SchemaError("'required' lists more properties than 'maxProperties' allows")
    if least <= sure:
        schema.pop("minProperties", None)
    limited = {"minProperties", "maxProperties"} & schema.keys()
    named = schema.keys() & {"patternProperties", "propertyNames"}
    is_open = schema.get("additionalProperties", True) is not False or bool(named)
    if not is_open and least > len(schema.get("properties", {})):
        raise SchemaError("'minProperties' exceeds the number of properties that are allowed")
    if least <= sure + 1 or not is_open:
        if limited and not named:
            schema.setdefault("additionalProperties", True)
        return
    if "additionalProperties" not in schema and not named:
        schema["additionalProperties"] = False
        if least <= len(schema.get("properties", {})):
            return
        del schema["additionalProperties"]
    why = f"can be enforced only up to {sure + 1} here, because names may repeat"
    context.refuse(schema, {"minProperties"}, why)


def _list_required(schema: Schema, context: Context) -> None:
    """List the required properties that are missing from `properties`.

    Each gets the schema of the pattern that matches its name, else that of additionalProperties."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if not missing:
        return
    others = schema.get("additionalProperties", True)
    added = {}
    for name in missing:
        found = [v for p, v in patterns.items() if may_match(p, name, context.budget)]
        inner = found[0] if found else others
        if inner is False:
            raise SchemaError(f"{name[:100]!r} is required, but no such property is allowed")
        added[name] = inner if isinstance(inner, dict) else {}
    schema["properties"] = {**properties, **added}


def _rewrite_patterns(schema: Schema, context: Context) -> None:
    """Rewrite the patterns for the compiler, and forbid additional properties beside them.

    Otherwise the compiler would accept any name as an additional property."""
    given = schema.get("patternProperties")
    if given is None:
        return
    schema["additionalProperties"] = False
    written: dict[str, Any] = {}
    for pattern, inner in given.items():
        context.budget.spend(pattern_weight(pattern))
        try:
            written[json_pattern(pattern)] = inner
        except HalfSurrogate as error:
            raise SchemaError(f"the pattern of a property {error}") from None
        except RegexError as error:
            if context.strict:
                shown = f"{pattern[:60]!r} {error}"
                raise SchemaError(f"'patternProperties' cannot be enforced: {shown}") from None
    written = {pattern: inner for pattern, inner in written.items() if inner is not False}
    schema["patternProperties"] = written
    if not written:
        del schema["patternProperties"]


def _drop_impossible(schema: Schema, context: Context) -> None:
    """Remove properties with the schema false, which may never appear."""
    given = schema.get("properties", {})
    never = [name for name, inner in given.items() if inner is False]
    if not never:
        return
    for name in never:
        if name in schema.get("required", ()):
            raise SchemaError(f"{name[:100]!r} is required, but no value satisfies it")
    if schema.get("additionalProperties", False) is not False:
        why = f"{never[0][:100]!r} cannot be forbidden where additional properties are allowed"
        if context.strict:
            raise SchemaError(why)
    schema["properties"] = {name: v for name, v in given.items() if v is not False}
