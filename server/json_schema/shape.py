"""Checks that a schema's keywords have values of the right kind, and bounds the work on it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 200
MAX_GRAMMAR_CHARS = 1 << 17  # as the worker has it: more can take minutes to compile
MAX_PARTS = 10_000  # of the work: beyond it, the text is too long for the compiler anyway
MAX_GIVEN_PARTS = 50_000  # of what a client sends, much of which may never be referred to
_FREE_PARTS = 1500
_GROWTH = 5  # parts of work for each part that was sent: what stands beside a choice multiplies

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# Each keyword binds values of one type alone; in this order, a schema without a type gets one.
KEYWORDS: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "additionalItems", "unevaluatedItems"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
    ),
    "object": (
        *("properties", "required", "patternProperties", "propertyNames", "minProperties"),
        *("maxProperties", "additionalProperties", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    ),
}
TYPE_OF = {name: kind for kind, names in KEYWORDS.items() for name in names}
UNENFORCED = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "uniqueItems", "$dynamicRef", "$recursiveRef"),
}
CHOOSERS = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
KNOWN = {"type", *CHOOSERS, *TYPE_OF, *UNENFORCED}  # all else is a note
_COUNTS = {
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
}


class SchemaError(ValueError):
    """A schema that cannot be enforced, or that nothing satisfies; one sentence."""


class Budget:
    """How many parts may still be looked at or made: subschemas, list entries, properties."""

    def __init__(self, parts: int) -> None:
        self._parts = self._left = parts

    @classmethod
    def of(cls, *schemas: Any) -> Budget:
        """For the work on schemas of this size. SchemaError as `check_shape`."""
        given = cls(MAX_GIVEN_PARTS)
        for schema in schemas:
            check_shape(schema, given)
        return cls(min(_FREE_PARTS + _GROWTH * given.spent, MAX_PARTS))

    @property
    def spent(self) -> int:
        """The parts so far."""
        return self._parts - self._left

    def spend(self, parts: int) -> None:
        """Count parts; SchemaError once there are too many."""
        self._left -= parts
        if self._left < 0:
            raise SchemaError(
                f"it is too large: it comes to more than {self._parts} parts, counting what a "
                "choice repeats"
            )


def check_shape(schema: Any, budget: Budget | None = None) -> None:
    """SchemaError where a schema's keywords have values of a kind that no schema allows there.

    What reads schemas, here and in the tool parsers, may then take them apart without looking.
    """
    budget = budget or Budget(MAX_GIVEN_PARTS)
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        part, depth = stack.pop()
        budget.spend(1)
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise SchemaError("a schema must be an object or a boolean")
        if depth > MAX_DEPTH:
            raise SchemaError(f"it is nested more than {MAX_DEPTH} deep")
        for name, value in part.items():
            budget.spend(_weight(name, value))
            stack.extend((below, depth + 1) for below in _below(name, value))


def _weight(name: str, value: Any) -> int:
    if name == "patternProperties" and isinstance(value, dict):
        return sum(map(pattern_weight, value))
    if isinstance(value, list | dict):
        return len(value)
    return pattern_weight(value) if name == "pattern" and isinstance(value, str) else 0


def pattern_weight(pattern: str) -> int:
    """The parts that a pattern counts for."""
    return 1 + len(pattern) // 2


def _below(name: str, value: Any) -> list[Any]:
    """The schemas that a keyword holds."""
    if name in MAPS:
        if not isinstance(value, dict):
            raise SchemaError(f"{name!r} must be an object")
        return list(value.values())
    if name in LISTS or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise SchemaError(f"{name!r} must be a list")
        return list(value)
    if name in SINGLE:
        return [value]
    if _is_wrong(name, value):
        raise SchemaError(f"{name!r} has a value of a wrong kind")
    return []


def _is_wrong(name: str, value: Any) -> bool:
    if name in ("required", "type"):
        strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return not strings and not (name == "type" and isinstance(value, str))
    if name == "enum":
        return not isinstance(value, list)
    if name in ("$ref", "pattern", "format"):
        return not isinstance(value, str)
    if name in _COUNTS:
        return not is_number(value) or value < 0 or value != int(value)
    if name in KEYWORDS["number"]:
        if isinstance(value, bool):  # as older schemas have it
            return not name.startswith("exclusive")
        return not is_number(value) or (name == "multipleOf" and value <= 0)
    return False


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; in Python booleans are integers."""
    return isinstance(value, int | float) and not isinstance(value, bool)
