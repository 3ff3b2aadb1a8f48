"""Encodes texts of any length without holding the GIL for long.

The backend releases the GIL while it encodes a batch, but not while it copies out the ids of an
encoding or frees it. A very long text is therefore not encoded at once: the tokens of its pieces
are counted first, until there are more than the limit allows, or as many as are needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

_PIECE = 1 << 16  # characters whose tokens are counted at once
_SLACK = 128  # tokens by which cutting out a piece may change its count
_GROUP = 1 << 18  # characters encoded in one batch
_SPACE = re.compile(r"\s")


class TooManyTokens(Exception):
    """A text has too many tokens: `count` of them if `is_exact`, otherwise at least `count`."""

    def __init__(self, count: int, is_exact: bool) -> None:
        super().__init__(count)
        self.count = count
        self.is_exact = is_exact


def encode(
    backend: Backend, texts: Sequence[str], add_special_tokens: bool, limit: int | None
) -> list[list[int]]:
    """The token ids of each text; raises TooManyTokens if one has more than `limit` tokens."""
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
    """Raise TooManyTokens if the text certainly has more than `limit` tokens.

    A short text passes unchecked, since its tokens can be counted exactly by encoding it."""
    if len(text) <= max(_PIECE, 4 * limit):
        return
    total = 0
    for start in range(0, len(text), _PIECE):
        total += _count(backend, text[start : start + _PIECE])
        if total > limit:
            raise TooManyTokens(total, False)


def tail_start(backend: Backend, text: str, last: int) -> int:
    """The index at which the text can be cut so that the rest still has its `last` tokens."""
    start, total = len(text), 0
    while start > 0 and total <= last:
        begin = max(start - _PIECE, 0)
        total += _count(backend, text[begin:start])
        start = begin
    space = _SPACE.search(text, start, start + _PIECE) if start else None
    return space.start() if space else start


def _count(backend: Backend, piece: str) -> int:
    """A lower bound of the number of tokens that the piece adds to a text."""
    (encoding,) = backend.encode_batch_fast([piece], add_special_tokens=False)
    return max(len(encoding) - _SLACK, 0)
