"""Lists the options, one per configuration field, and parses a single value of one.

This file does not know where a value came from: the caller passes a label (`--port`,
`SLIPSTREAM_PORT`, `port in my.yaml`), and every error starts with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
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
# No option needs more, in seconds or milliseconds, and in tokens or bytes.
_MOST_REAL, _MOST_WHOLE = 1e12, 1 << 63
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class ConfigError(Exception):
    """The configuration is invalid; the text is one sentence that names the option and value."""


@dataclass(frozen=True)
class Option:
    """One configuration field as a user sees it."""

    name: str  # for example max_model_len
    section: str  # the field of `Config` that holds it, for example model
    kind: type  # int, float, bool or str; of each element if the value is a tuple
    many: bool  # the value is a tuple
    optional: bool  # the value may be None
    default: Any
    doc: str
    choices: tuple[str, ...]
    short: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
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
    """The options that the dataclass `cls` declares with `schema.option`."""
    hints = get_type_hints(cls)
    return [
        Option(field.name, section, *_shape(hints[field.name]), field.default, **field.metadata)
        for field in dataclasses.fields(cls)
        if "doc" in field.metadata  # the others are declared with `schema.internal`
    ]


def _shape(hint: Any) -> tuple[type, bool, bool]:
    """Split a field's type into (element type, whether it is a tuple, whether None is allowed)."""
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        (hint,) = [arg for arg in get_args(hint) if arg is not type(None)]
    many = get_origin(hint) is tuple
    kind = get_args(hint)[0] if many else hint
    assert kind in _NOUNS, f"a field cannot be of type {hint}"
    return kind, many, optional


def read_text(option: Option, label: str, text: str) -> Any:
    """Parse the text of a flag or environment variable; raises ConfigError if it is invalid.

    Commas separate the elements of a tuple; `8k` is 8000 and `8K` is 8192."""
    if option.many:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:  # --api-key "$KEY" with KEY unset must not open the server to everyone
            raise _empty(option, label)
        return tuple(_checked(option, label, part, _parse(option.kind, part)) for part in parts)
    return _checked(option, label, text, _parse(option.kind, text))


def read_value(option: Option, label: str, value: Any) -> Any:
    """Check a value from YAML or JSON, which already has a type; raises ConfigError."""
    if value is None and option.optional:
        return None
    if option.many:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and not v.strip() for v in values):
            raise _empty(option, label)
        return tuple(_checked(option, label, v, _exact(option.kind, v)) for v in values)
    if option.kind is str and isinstance(value, dict):  # the flag takes this object as JSON text
        return _checked(option, label, value, json.dumps(value))
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
    # A model's place has checks of its own.
    if option.name != "model" and (rule := _broken_rule(value)) is not None:
        raise ConfigError(f"{label} must be {rule}, not {str(given)[:40]!r}")
    return value


def _broken_rule(value: Any) -> str | None:
    """What a value of the right type must be but is not, whatever option it is for."""
    if isinstance(value, float) and not abs(value) <= _MOST_REAL:  # true for NaN as well
        return f"a number of at most {_MOST_REAL:g}"
    if type(value) is int and not abs(value) < _MOST_WHOLE:
        return "a whole number that 64 bits can hold"
    if isinstance(value, str) and "\0" in value:
        return "text without zero bytes"
    return None


def _parse(kind: type, text: str) -> Any:
    """The value that `text` spells, or None if it does not spell one of that type."""
    if kind is bool:
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else None
    if kind is int:
        match = re.fullmatch(r"\s*([+-]?[0-9]{1,30})([kmgKMG]?)\s*", text)
        return int(match[1]) * _SUFFIXES.get(match[2], 1) if match else None
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return None
    return text


def _exact(kind: type, value: Any) -> Any:
    """The value if it has that type or converts without loss (1 to 1.0, "8k" to 8000), or None."""
    if isinstance(value, str) and kind is int:
        return _parse(int, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < _MOST_WHOLE else math.inf
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # YAML reads an unquoted 1234 as a number
    return value if type(value) is kind else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` with the closest known word, or an empty string if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
