"""Rewrites the limits of strings and arrays into forms that the compiler enforces."""

from __future__ import annotations

from .regex_syntax import HalfSurrogate, RegexError
from .regex_text import json_pattern, length_pattern
from .shape import Context, Schema, SchemaError, pattern_weight

MAX_COUNT = 1_000_000  # largest count of items, characters or properties

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = (
    "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-z0-9]{1,30}(?:-[a-z0-9]{1,20})?"
_NAME = "[A-Za-z0-9_+%-]{1,30}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
# The compiler knows these formats, too, but accepts impossible days, addresses with leading zeros,
# names that are too long, and quotes that end the string.
_SPELLED = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "email": rf"{_NAME}(?:\.{_NAME})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
_COMPILED = {"duration", "ipv6", "uuid", "uri", "uri-reference", "uri-template"}
_UNKNOWN_TO_IT = {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}


def clamp_counts(schema: Schema, kind: str, context: Context) -> None:
    """Turn the limits min`kind` and max`kind` into integers up to MAX_COUNT, in place.

    No reply is long enough to need more. Raises SchemaError if the minimum exceeds the maximum."""
    low, high = f"min{kind}", f"max{kind}"
    for name in (low, high):
        if name in schema:
            schema[name] = int(schema[name])
    if schema.get(low, 0) > MAX_COUNT:
        context.refuse(schema, {low}, f"cannot be enforced above {MAX_COUNT}")
    if high in schema:
        schema[high] = min(schema[high], MAX_COUNT)
        if schema.get(low, 0) > schema[high]:
            raise SchemaError(f"{low!r} is greater than {high!r}")


def limit_string(schema: Schema, context: Context) -> None:
    """Replace length limits, format or pattern by one pattern for the JSON text, in place."""
    clamp_counts(schema, "Length", context)
    _spell_format(schema, context)
    lengths = {"minLength", "maxLength"} & schema.keys()
    shape = {"pattern", "format"} & schema.keys()
    if lengths and shape:
        context.refuse(schema, lengths, f"cannot be enforced together with {sorted(shape)[0]!r}")
    if len(shape) == 2:
        context.refuse(schema, {"format"}, "cannot be enforced together with 'pattern'")
    if schema.get("format") in _SPELLED:
        schema["pattern"] = f"^(?:{_SPELLED[schema.pop('format')]})$"
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", None)
    if low or high is not None:
        schema["pattern"] = length_pattern(low, high)
    elif "pattern" in schema:
        write_pattern(schema, context)


def write_pattern(schema: Schema, context: Context) -> None:
    """Rewrite the schema's pattern for the compiler, in place.

    One that cannot be enforced is an error if strict, else it is dropped."""
    context.budget.spend(pattern_weight(schema["pattern"]))
    try:
        schema["pattern"] = json_pattern(schema["pattern"])
    except HalfSurrogate as error:
        raise SchemaError(f"'pattern' {error}") from None
    except RegexError as error:
        shown = schema["pattern"][:60]
        context.refuse(schema, {"pattern"}, f"cannot be enforced: {shown!r} {error}")


def _spell_format(schema: Schema, context: Context) -> None:
    """Drop a format that JSON Schema does not define, or that cannot be enforced, in place.

    If strict, raises SchemaError for the latter."""
    name = schema.get("format")
    if name in _UNKNOWN_TO_IT:
        context.refuse(schema, {"format"}, f"cannot be enforced as {name!r}")
    elif name is not None and name not in _SPELLED and name not in _COMPILED:
        del schema["format"]


def limit_array(schema: Schema, context: Context) -> None:
    """Rewrite the items of all drafts into `prefixItems` and `items`, in place.

    Without rules for further items, an array with `prefixItems` has none unless `minItems` needs
    some, and any other array may have any. Raises SchemaError if `minItems` cannot be reached."""
    clamp_counts(schema, "Items", context)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = schema.get("additionalItems", True)
    schema.pop("additionalItems", None)
    unevaluated = schema.pop("unevaluatedItems", True)
    prefix = [{} if item is True else item for item in schema.pop("prefixItems", ())]
    is_enough = bool(prefix) and schema.get("minItems", 0) <= len(prefix)
    schema.setdefault("items", False if is_enough else unevaluated)
    if False in prefix:
        prefix = prefix[: prefix.index(False)]
        schema["items"] = False
    most = schema.get("maxItems")
    if most is not None and most <= len(prefix):
        prefix = prefix[:most]
        schema["items"] = False
    if prefix:
        schema["prefixItems"] = prefix
    if schema["items"] is False:
        if schema.get("minItems", 0) > len(prefix):
            raise SchemaError("'minItems' exceeds the number of items that are allowed")
        schema.pop("maxItems", None)
