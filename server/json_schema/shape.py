"""Checks the types of a schema's keywords, bounds the work on it, and resolves its references."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

MAX_DEPTH = 200
MAX_GRAMMAR_CHARS = 1 << 17  # the worker's limit; a longer grammar can take minutes to compile
MAX_PARTS = 10_000  # parts of work; a schema with more is too long for the compiler anyway
MAX_GIVEN_PARTS = 50_000  # parts that a client may send; many may never be referred to
_FREE_PARTS = 1500
_GROWTH = 5  # parts of work per part sent, because keywords beside a choice go into every branch

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# Type -> the keywords that limit values of that type and no other.
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
KNOWN = {"type", *CHOOSERS, *TYPE_OF, *UNENFORCED}  # other keywords are annotations
_COUNTS = {
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
}


class SchemaError(ValueError):
    """A schema is invalid, cannot be enforced, or has no value that satisfies it; one sentence."""


class Budget:
    """Counts the parts that may still be processed: subschemas, list entries, properties."""

    def __init__(self, parts: int) -> None:
        self._parts = self._left = parts

    @classmethod
    def of(cls, *schemas: Any) -> Budget:
        """Check the schemas' shape, and return a budget for the work on them that suits their size.

        Raises SchemaError as `check_shape`."""
        given = cls(MAX_GIVEN_PARTS)
        for schema in schemas:
            check_shape(schema, given)
        return cls(min(_FREE_PARTS + _GROWTH * given.spent, MAX_PARTS))

    @property
    def spent(self) -> int:
        return self._parts - self._left

    def spend(self, parts: int) -> None:
        """Count `parts`; raises SchemaError if the budget is exceeded."""
        self._left -= parts
        if self._left < 0:
            raise SchemaError(
                f"it is too large: it has more than {self._parts} parts, counting those that a "
                "choice repeats"
            )


def check_shape(schema: Any, budget: Budget | None = None) -> None:
    """Raise SchemaError if a keyword of a schema has a value of the wrong type.

    After it, code that reads schemas, here and in the tool parsers, need not check types again.
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
            raise SchemaError(f"it is nested more than {MAX_DEPTH} levels deep")
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
    """What a pattern costs of a budget: one part, and one more for every two characters."""
    return 1 + len(pattern) // 2


def _below(name: str, value: Any) -> list[Any]:
    """The subschemas in a keyword's value; raises SchemaError if its type is wrong."""
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
        raise SchemaError(f"{name!r} has a value of the wrong type")
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
        if isinstance(value, bool):  # allowed in older drafts of JSON Schema
            return not name.startswith("exclusive")
        return not is_number(value) or (name == "multipleOf" and value <= 0)
    return False


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; booleans, which are integers in Python, are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


_PLAIN = re.compile(r"#/(?:\$defs|definitions)/([\w.\- ]+)")


class Context:
    """The state of one schema's preparation; `root` is the schema that references point into."""

    def __init__(self, root: Schema, strict: bool, budget: Budget, prefix: str) -> None:
        self.root = root
        self.strict = strict
        self.budget = budget
        self._prefix = prefix
        self.pending: list[tuple[str, Any]] = []  # definitions yet to prepare: name, given schema
        self._names: dict[str, str] = {}  # JSON pointer -> name of its definition in `$defs`
        self._taken: set[str] = set()
        self._targets: dict[str, Any] = {}

    def refuse(self, schema: Schema, names: Iterable[str], why: str) -> None:
        """Raise SchemaError about the keywords `names` if strict, else remove them in place."""
        found = sorted(names)
        if self.strict:
            raise SchemaError(f"{' and '.join(map(repr, found))} {why}")
        for name in found:
            schema.pop(name, None)

    def target(self, reference: str) -> Any:
        """The schema that a reference points to.

        A target that consists of `$ref` alone is followed; one with other keywords beside it is
        returned as it is. Raises SchemaError if the target does not exist, lies outside the schema
        or is not a valid schema, if the references form a circle, or if the budget is exceeded.
        """
        return self._followed(reference)[1]

    def link(self, reference: str) -> str:
        """Translate a reference of the given schema to one of the prepared schema, `#/$defs/NAME`.

        Adds the definition to `pending` if it is new. Raises SchemaError as `target` does.
        """
        pointer, schema = self._followed(reference)
        if pointer not in self._names:
            plain = _PLAIN.fullmatch(pointer)
            wanted = name = self._prefix + (plain[1] if plain else "schema")
            while name in self._taken:
                name = f"{wanted}{len(self._taken)}"
            self._taken.add(name)
            self._names[pointer] = name
            self.pending.append((name, schema))
        return f"#/$defs/{self._names[pointer]}"

    def _followed(self, reference: str) -> tuple[str, Any]:
        seen = set()
        while True:
            if reference in seen:
                raise SchemaError(f"'$ref' {reference[:100]!r} refers to itself")
            seen.add(reference)
            self.budget.spend(1)
            found = self._find(reference)
            if not isinstance(found, dict) or found.keys() != {"$ref"}:
                return reference, found
            reference = found["$ref"]

    def _find(self, reference: str) -> Any:
        if reference not in self._targets:
            self._targets[reference] = self._walk(reference)
        return self._targets[reference]

    def _walk(self, reference: str) -> Any:
        shown = reference[:100]
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(f"'$ref' must stay within the schema, not point to {shown!r}")
        found: Any = self.root
        parts = reference[2:].split("/") if reference != "#" else []
        self.budget.spend(len(parts))
        for part in parts:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and key.isascii() and len(key) < 10:
                key_found = int(key) < len(found)
                found = found[int(key)] if key_found else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
            if found is None:
                raise SchemaError(f"'$ref' points to {shown!r}, which does not exist")
        if reference != "#" and not _PLAIN.fullmatch(reference):
            check_shape(found, self.budget)  # not checked before if no known keyword contains it
        return found
