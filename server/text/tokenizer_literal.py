"""Encodes texts in which only marked places are special tokens, and all else is plain text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..chat_templates.content_guard import any_of


class LiteralEncoder:
    """Encodes the parts of a chat (see `content_guard`) as one text.

    It uses a twin of the backend that treats special tokens as plain characters. The twin has an
    additional token, a marker with an unguessable text, for each special token. Where the template
    wrote a special token, the marker is encoded, and its id is replaced by the special token's.
    All other text is thus normalized, split and merged in the same context as with the backend.
    """

    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._twin = _twin(backend)
        self._twin.encode_special_tokens = True
        secret = secrets.token_hex(8)
        markers: list[AddedToken] = []
        self._markers: dict[str, str] = {}  # special token -> marker
        for index in sorted(self._special_ids):
            token = added[index]
            marker = self._markers[token.content] = f"\ue000{secret}{index}\ue001"
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
            markers.append(AddedToken(marker, normalized=False, special=False, **flags))
        self._gap = f"\ue000{secret}\ue001"
        self._twin.add_tokens([*markers, AddedToken(self._gap, normalized=False, special=False)])
        self._ids = {
            self._twin.token_to_id(self._markers[added[index].content]): index
            for index in self._special_ids
        }
        self._gap_id = self._twin.token_to_id(self._gap)
        self._token = re.compile(any_of(self._markers))

    def encode(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        """The token ids of the joined parts; the parts at odd indices are special tokens."""
        text = self._joined(parts)
        ids = self._encode(text, False)
        if not self._special_ids.isdisjoint(ids):  # the vocabulary merges characters into one
            text = self._joined([*parts], gaps=True)
            ids = self._encode(text, False)
        if add_special_tokens:
            ids = self._encode(text, True)
        known = self._ids
        return [known.get(i, i) for i in ids if i != self._gap_id]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (found,) = self._twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def _joined(self, parts: Sequence[str], gaps: bool = False) -> str:
        pieces = []
        for number, part in enumerate(parts):
            if number % 2:
                pieces.append(self._markers[part])
            else:
                pieces.append(self._broken(part) if gaps else part)
        return "".join(pieces)

    def _broken(self, text: str) -> str:
        """The text with a gap token inside each special token, across which nothing is merged."""
        while self._token.search(text):
            text = self._token.sub(lambda found: found[0][0] + self._gap + found[0][1:], text)
        return text


def _twin(backend: Backend) -> Backend:
    """A copy of the backend that shares its vocabulary, which is most of its memory."""
    twin = Backend(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(twin, name, part)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([token for _, token in sorted(added.items())])
    if _contents(twin) != _contents(backend):  # the ids of added tokens are not consecutive
        twin = Backend.from_str(backend.to_str())
    return twin


def _contents(backend: Backend) -> dict[int, tuple[str, bool]]:
    added = backend.get_added_tokens_decoder()
    return {index: (token.content, token.special) for index, token in added.items()}
