"""The state that all steps of a schema's preparation share: strictness, budget and references."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from .shape import Budget, Schema, SchemaError, check_shape

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
