"""Encodes texts of any length without holding Python's lock for long.

The backend releases the lock while it encodes a batch, but not while it hands over the ids of an
encoding or frees it. So a text is not encoded whole if it cannot be used whole: pieces of it are
counted first, until there are too many tokens, or enough of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

_PIECE = 1 << 16  # characters that are counted at once
_SLACK = 128  # tokens by which the cuts around a piece may change their number
_GROUP = 1 << 18  # characters encoded at once; the encodings are freed together
_SPACE = re.compile(r"\s")


class TooManyTokens(Exception):
    """A text has more tokens than may be; `count` of them, or at least as many."""

    def __init__(self, count: int, is_exact: bool) -> None:
        super().__init__(count)
        self.count = count
        self.is_exact = is_exact


def encode(
    backend: Backend, texts: Sequence[str], add_special_tokens: bool, limit: int | None
) -> list[list[int]]:
    """The ids of each text; TooManyTokens if one has more than `limit`."""
    found: list[list[int]] = []
    for group in _groups(texts):
        if limit is not None:
            for text in group:
                check(backend, text, limit)
        for encoding in backend.encode_batch_fast(group, add_special_tokens=add_special_tokens):
            found.append(_ids(encoding, limit))
    return found


def _ids(encoding: Encoding, limit: int | None) -> list[int]:
    if limit is not None and len(encoding) > limit:
        raise TooManyTokens(len(encoding), True)
    ids: list[int] = encoding.ids
    return ids


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _GROUP:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def check(backend: Backend, text: str, limit: int) -> None:
    """TooManyTokens if pieces of the text show that it has more than `limit`."""
    if len(text) <= max(_PIECE, 4 * limit):
        return  # few enough to be counted exactly
    total = 0
    for start in range(0, len(text), _PIECE):
        total += _count(backend, text[start : start + _PIECE])
        if total > limit:
            raise TooManyTokens(total, False)


def tail_start(backend: Backend, text: str, last: int) -> int:
    """Where the text can be cut so that the rest still has its `last` tokens."""
    start, total = len(text), 0
    while start > 0 and total <= last:
        begin = max(start - _PIECE, 0)
        total += _count(backend, text[begin:start])
        start = begin
    space = _SPACE.search(text, start, start + _PIECE) if start else None
    return space.start() if space else start


def _count(backend: Backend, piece: str) -> int:
    """A number of tokens that the piece surely adds to a text."""
    (encoding,) = backend.encode_batch_fast([piece], add_special_tokens=False)
    return max(len(encoding) - _SLACK, 0)
