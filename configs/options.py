"""Owns the list of options, one per configuration field, and the reading of one value.

It does not know where a value came from: the caller hands over a label (`--port`,
`SLIPSTREAM_PORT`, `port in my.yaml`) that starts the sentence of an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from .schema import Config, SpeculativeConfig

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WITHOUT = {"api_key": " to serve without a key", "admin_api_key": " to keep /v1/speculator off"}
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class ConfigError(Exception):
    """A configuration that cannot be served: one sentence that names option and value."""


@dataclass(frozen=True)
class Option:
    """One configuration field, seen from the outside."""

    name: str  # max_model_len
    section: str  # model
    kind: type  # int, float, bool or str: of the value, or of each element of a tuple
    many: bool  # a tuple
    optional: bool  # None is a value
    default: Any
    doc: str
    choices: tuple[str, ...]
    short: str | None

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "SLIPSTREAM_" + self.name.upper()


@cache
def all_options() -> dict[str, Option]:
    """Every option that has a flag, by field name, in the order of the sections."""
    found: dict[str, Option] = {}
    for section, cls in get_type_hints(Config).items():
        if cls is SpeculativeConfig:
            continue
        for option in section_options(section, cls):
            assert option.name not in found, f"two sections have a field {option.name}"
            found[option.name] = option
    return found


def section_options(section: str, cls: type) -> list[Option]:
    """The options of one section."""
    hints = get_type_hints(cls)
    options = []
    for field in dataclasses.fields(cls):
        meta = field.metadata
        if "doc" not in meta:  # `schema.internal`
            continue
        kind, many, optional = _shape(hints[field.name])
        options.append(
            Option(
                field.name,
                section,
                kind,
                many,
                optional,
                field.default,
                meta["doc"],
                meta["choices"],
                meta["short"],
            )
        )
    return options


def _shape(hint: Any) -> tuple[type, bool, bool]:
    """(element type, is a tuple, may be None) of a field's type."""
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        (hint,) = [arg for arg in get_args(hint) if arg is not type(None)]
    many = get_origin(hint) is tuple
    kind = get_args(hint)[0] if many else hint
    assert kind in _NOUNS, f"a field cannot be of type {hint}"
    return kind, many, optional


def read_text(option: Option, label: str, text: str) -> Any:
    """A flag's or variable's value. Tuples are comma separated, `8k` is 8000 and `8K` is 8192."""
    if option.many:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:  # a shell's unset variable must not open a server: --api-key "$KEY"
            raise _empty(option, label)
        return tuple(_checked(option, label, part, _parse(option.kind, part)) for part in parts)
    return _checked(option, label, text, _parse(option.kind, text))


def read_value(option: Option, label: str, value: Any) -> Any:
    """A value from YAML or JSON, which has a type of its own already."""
    if value is None and option.optional:
        return None
    if option.many:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and not v.strip() for v in values):
            raise _empty(option, label)
        return tuple(_checked(option, label, v, _exact(option.kind, v)) for v in values)
    if option.kind is str and isinstance(value, dict):  # an object where the flag takes JSON text
        return json.dumps(value)
    return _checked(option, label, value, _exact(option.kind, value))


def _empty(option: Option, label: str) -> ConfigError:
    return ConfigError(f"{label} is empty; leave it out{_WITHOUT.get(option.name, '')}")


def _checked(option: Option, label: str, given: Any, value: Any) -> Any:
    if value is None:
        noun = _NOUNS[option.kind] if not option.many else f"a list, each {_NOUNS[option.kind]}"
        raise ConfigError(f"{label} must be {noun}, not {given!r}")
    if option.choices and value not in option.choices:
        hint = did_you_mean(str(value), option.choices)
        raise ConfigError(
            f"{label} must be one of {', '.join(option.choices)}, not {given!r}{hint}"
        )
    return value


def _parse(kind: type, text: str) -> Any:
    """The value in `text`, or None if it is not of that kind."""
    if kind is bool:
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else None
    if kind is int:
        match = re.fullmatch(r"\s*([+-]?\d+)([kmgKMG]?)\s*", text)
        return int(match[1]) * _SUFFIXES.get(match[2], 1) if match else None
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return None
    return text


def _exact(kind: type, value: Any) -> Any:
    """The value if it has that type (an int is a fine float, `8k` a fine int), else None."""
    if isinstance(value, str) and kind is int:
        return _parse(int, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # YAML reads an unquoted 1234 as a number
    return value if type(value) is kind else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
