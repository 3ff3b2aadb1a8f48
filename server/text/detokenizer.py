"""Converts token ids to text, at once or incrementally, with the same characters either way.

For the common kinds of decoder, each token becomes a byte string in a table. Decoding then joins
bytes: it costs O(1) per token and holds back only incomplete characters. Other decoders are rerun
on a window of the last tokens. Nothing here knows about requests or stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW = 6  # tokens of context for decoders without a table


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, the inverse of GPT-2's mapping of bytes to characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid byte by one U+FFFD, as byte-fallback decoders do."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("slipstream-byte-fallback", _one_mark_per_byte)

PieceBytes = Callable[[str], bytes]


@dataclass(frozen=True)
class Spelling:
    """How a decoder converts tokens to bytes, in general and at the start of a text."""

    piece: PieceBytes
    first: PieceBytes  # for the first token of a text
    errors: str = "replace"  # codec error handler for invalid bytes
    strip: int = 0  # most spaces removed at the start of a text


class ByteTable:
    """Maps token ids to bytes; entries are computed on first use."""

    def __init__(self, backend: Backend, spelling: Spelling) -> None:
        self.spelling = spelling
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self.texts = _Texts(self)

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id without a token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id, self.spelling.piece)
        return known

    def first(self, token_id: int) -> bytes:
        """The token's bytes at the start of a text."""
        return self._bytes(token_id, self.spelling.first)

    def _bytes(self, token_id: int, piece_bytes: PieceBytes) -> bytes:
        piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if piece is None else piece_bytes(piece)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence of ids."""
        rest = iter(ids)
        start = b"".join([self.first(i) for i in islice(rest, 1)])
        text = b"".join([start, *(self[i] for i in rest)]).decode("utf-8", self.spelling.errors)
        return text[_leading_spaces(text, self.spelling.strip) :]


class _Texts(dict[int, str | None]):
    """Maps token ids to text, or to None if the token's bytes are not whole characters."""

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        try:
            text: str | None = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        return self.setdefault(token_id, text)


def _leading_spaces(text: str, most: int) -> int:
    return min(len(text) - len(text.lstrip(" ")), most)


def byte_table(backend: Backend) -> ByteTable | None:
    """The table for a byte-level, byte-fallback or metaspace decoder; None for any other."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    spelling = _spelling(parts)
    return ByteTable(backend, spelling) if spelling else None


def _spelling(parts: list[dict[str, Any]]) -> Spelling | None:
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return Spelling(_byte_level_piece, _byte_level_piece)
    if kinds == ["Metaspace"]:
        return _metaspace(parts[0]["replacement"], parts[0].get("prepend_scheme") != "never")
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _byte_fallback(kinds, parts)
    return None


def _metaspace(mark: str, prepended: bool) -> Spelling:
    return Spelling(
        piece=lambda piece: piece.replace(mark, " ").encode(),
        first=lambda piece: piece.replace(mark, "" if prepended else " ").encode(),
    )


_ALPHABET = _byte_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:  # an added token, spelled in plain text
        return piece.encode()


def _byte_fallback(kinds: list[str], parts: list[dict[str, Any]]) -> Spelling | None:
    """The spelling of sentencepiece's decoder in tokenizers: Replace, ByteFallback, Fuse, Strip.

    None if the steps have unusual settings."""
    replaces = [(p["pattern"].get("String"), p["content"]) for p in parts if p["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    if any(pattern is None for pattern, _ in replaces) or len(strips) > 1:
        return None
    if strips and ("Fuse" not in kinds[: kinds.index("Strip")] or strips[0]["stop"]):
        return None
    if strips and strips[0]["content"] != " ":
        return None
    has_bytes = "ByteFallback" in kinds

    def piece_bytes(piece: str) -> bytes:
        for pattern, content in replaces:
            piece = piece.replace(pattern, content)
        found = _BYTE_TOKEN.fullmatch(piece) if has_bytes else None
        return bytes([int(found[1], 16)]) if found else piece.encode()

    strip = strips[0]["start"] if strips else 0
    return Spelling(piece_bytes, piece_bytes, "slipstream-byte-fallback", strip)


class Vocabulary(Protocol):
    """The part of a tokenizer that a detokenizer uses."""

    backend: Backend
    table: ByteTable | None
    special_ids: frozenset[int]


class IncrementalDetokenizer:
    """Converts a growing sequence of ids to text, delta by delta.

    `skip_special_tokens` drops special tokens, except those in `keep` (markers that a tool-call or
    reasoning parser looks for). The deltas joined equal `Tokenizer.decode` of all ids. With
    `prompt_ids`, they are what the ids add to the prompt's text, so a leading space is kept.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.dropped = vocabulary.special_ids - keep if skip_special_tokens else frozenset()
        self._steps: _Steps = (
            _TableSteps(vocabulary.table, continues=bool(prompt_ids))
            if vocabulary.table
            else _WindowSteps(vocabulary.backend, prompt_ids)
        )
        self._push = self._steps.push

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the characters that they complete."""
        if len(ids) == 1:  # the usual case
            (token_id,) = ids
            return "" if token_id in self.dropped else self._push(token_id)
        return "".join(self.push_tokens(ids))

    def push_tokens(self, ids: Sequence[int]) -> list[str]:
        """As `push`, but one string per token; a character goes to the token that completes it."""
        push, dropped = self._push, self.dropped
        return ["" if i in dropped else push(i) for i in ids]

    def flush(self) -> str:
        """End the text; returns the bytes held back, which form no character, as U+FFFD."""
        return self._steps.flush()


class _Steps(Protocol):
    """One way to decode incrementally."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _TableSteps:
    """Feeds the bytes of the table to an incremental UTF-8 decoder."""

    def __init__(self, table: ByteTable, continues: bool) -> None:
        self._table = table
        self._texts = table.texts
        decoder = codecs.getincrementaldecoder("utf-8")(table.spelling.errors)
        self._decoder = decoder
        self._is_first = not continues
        self._strip = 0 if continues else table.spelling.strip
        self._is_plain = False  # not at the start of the text, and no byte is held back

    def push(self, token_id: int) -> str:
        if self._is_plain:
            text = self._texts[token_id]
            if text is not None:
                return text
        piece = self._table.first(token_id) if self._is_first else self._table[token_id]
        self._is_first = False
        text = self._start(self._decoder.decode(piece))
        self._is_plain = not (self._strip or self._decoder.buffer)
        return text

    def flush(self) -> str:
        return self._start(self._decoder.decode(b"", final=True))

    def _start(self, text: str) -> str:
        if self._strip and text:
            spaces = _leading_spaces(text, self._strip)
            self._strip = self._strip - spaces if spaces == len(text) else 0
            return text[spaces:]
        return text


class _WindowSteps:
    """Decodes a window of the last tokens again with each new one, and returns the difference."""

    def __init__(self, backend: Backend, prompt_ids: Sequence[int]) -> None:
        self._backend = backend
        self._ids = list(prompt_ids[-_WINDOW:])
        self._shown = len(self._ids)  # ids whose text has been emitted

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._decode(self._ids)
        if new.endswith("\ufffd") and len(self._ids) - self._shown < _WINDOW:
            return ""
        return self._emit(new)

    def flush(self) -> str:
        return self._emit(self._decode(self._ids))

    def _emit(self, new: str) -> str:
        old = self._decode(self._ids[: self._shown])
        self._ids = self._ids[-_WINDOW:]
        self._shown = len(self._ids)
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False) if ids else ""
