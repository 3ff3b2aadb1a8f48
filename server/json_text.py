"""Writes values as JSON text that UTF-8 can encode, parses JSON strictly, and limits its size.

Parsing cannot be interrupted: the parser creates an object for every value and holds Python's
global lock until it is done, so a few megabytes of brackets would block the server for seconds.
Counting costs only a few passes over the bytes.
"""

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


MAX_DEPTH = 64
MAX_VALUES = 1_000_000
MAX_TEXTS = 300_000
MAX_CONTAINERS = 100_000  # objects and lists
MAX_NAMES = 100_000  # members of all objects together
_PIECE = 1 << 18  # bytes


def too_many(data: bytes) -> str | None:
    """The exceeded limit in words for the client, or None if the text may be parsed."""
    if not _complaint(_counts(data)):  # an upper bound: it also counts characters inside strings
        return None
    totals = [0, 0, 0, 0]
    in_string, start = False, 0
    while start < len(data):
        end = start + _PIECE
        while data[end - 1 : end] == b"\\":  # do not split an escape sequence
            end += 1
        piece = data[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        counts = _counts(outside)
        counts[-1] = len(parts) - 1
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        if complaint := _complaint(totals):
            return complaint
        start = end
    return None


def too_deep(data: bytes, value: Any) -> bool:
    """Whether `value`, parsed from `data`, is nested more than MAX_DEPTH levels deep."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += item.values()
            elif isinstance(item, list):
                children += item
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _counts(data: bytes) -> list[int]:
    """Upper bounds of the numbers of values, containers, names and quotation marks."""
    return [
        data.count(b",") + data.count(b"[") + data.count(b"{"),
        data.count(b"[") + data.count(b"{"),
        data.count(b":"),
        data.count(b'"'),
    ]


def _complaint(counts: list[int]) -> str | None:
    values, containers, names, quotes = counts
    if containers > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS:,} objects and lists"
    if names > MAX_NAMES:
        return f"objects with more than {MAX_NAMES:,} members"
    if quotes > 2 * MAX_TEXTS:
        return f"more than {MAX_TEXTS:,} strings"
    return f"more than {MAX_VALUES:,} values" if values > MAX_VALUES else None
