"""Writes values that a model spelled as JSON text that UTF-8 can carry, and reads them strictly."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """`value` as JSON. ValueError for NaN and infinity; halves of a surrogate pair stay escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return encodable(text)


def encodable(text: str) -> str:
    """JSON text whose halves of surrogate pairs, which UTF-8 does not have, are escapes."""
    return text.encode(errors="backslashreplace").decode()


def read_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none. Python alone would take NaN."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
