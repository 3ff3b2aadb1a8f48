"""Writes values as JSON text that UTF-8 can encode, and parses JSON strictly."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """The JSON text of a value, with halves of surrogate pairs as escapes.

    Raises ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return encodable(text)


def encodable(text: str) -> str:
    """JSON text with halves of surrogate pairs, which UTF-8 cannot encode, replaced by escapes."""
    return text.encode(errors="backslashreplace").decode()


def read_json(text: str) -> Any:
    """The value of a JSON text; raises ValueError if it is invalid.

    Unlike `json.loads`, it rejects NaN and infinity."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
