"""Keeps text that clients write in chats from becoming special tokens such as <|im_end|>.

Only the chat template may write special tokens. Before it renders, the first character of every
special token in the client's text is replaced by a stand-in character. Any special token in the
rendered text is therefore the template's; the stand-ins are then replaced back. This file must not
know token ids: `Tokenizer.encode_parts` encodes the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class RenderedChat:
    """A prompt, in which only the template's special tokens may be encoded as such.

    `parts` joined are `text`; the parts at odd indices are the template's special tokens. It is
    None if the client's text contains no special token, so that all those in `text` count."""

    text: str
    parts: tuple[str, ...] | None = None


class ContentGuard:
    """Hides special tokens in the client's part of a chat while it is rendered."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        tokens = set(filter(None, special_tokens))
        self._token = re.compile(any_of(tokens))
        self._parts = re.compile(f"({self._token.pattern})")
        self._prefixes = {token[:n] for token in tokens for n in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        self._firsts = sorted({token[0] for token in tokens})

    def hide(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Replace the first characters of special tokens in all texts of a value by stand-ins.

        Returns the new value and a map from stand-in to character. They are the value itself and {}
        if no text contains a special token, or ends with a prefix of one, which the next text of
        the chat might complete.
        """
        texts = list(_texts(value))
        if not any(self._token.search(text) or self._prefix_at_end(text) for text in texts):
            return value, {}
        stand_ins = self._choose("\n".join(texts))
        return self._replaced(value, stand_ins), {char: first for first, char in stand_ins.items()}

    def append(self, chat: RenderedChat, text: str) -> RenderedChat:
        """The chat with a text of ours at its end, of which special tokens are such."""
        if chat.parts is None or not text:
            return RenderedChat(chat.text + text, chat.parts)
        first, *rest = self._parts.split(text)
        parts = (*chat.parts[:-1], chat.parts[-1] + first, *rest)
        return RenderedChat(chat.text + text, parts)

    def reveal(self, rendered: str, stand_ins: Mapping[str, str]) -> RenderedChat:
        """The prompt rendered from a hidden value, with the client's own characters restored."""
        if not stand_ins:
            return RenderedChat(rendered)
        for char in stand_ins:  # `tojson` may have escaped it
            rendered = rendered.replace(_escape(char), char)
        parts = tuple(_shown(part, stand_ins) for part in self._parts.split(rendered))
        return RenderedChat("".join(parts), parts)

    def _choose(self, texts: str) -> dict[str, str]:
        """Map the first characters of special tokens to characters that the texts lack."""
        lower = texts.lower()
        free = (c for c in map(chr, _PRIVATE_USE) if c not in texts and _escape(c) not in lower)
        return dict(zip(self._firsts, free, strict=False))

    def _prefix_at_end(self, text: str) -> int:
        """The length of the longest prefix of a special token that the text ends with, or 0."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0

    def _replaced(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._hidden(value, stand_ins)
        if isinstance(value, Mapping):
            return {
                self._replaced(key, stand_ins): self._replaced(item, stand_ins)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._replaced(item, stand_ins) for item in value]
        return value

    def _hidden(self, text: str, stand_ins: Mapping[str, str]) -> str:
        while self._token.search(text):  # repeatedly, because special tokens may overlap
            text = self._token.sub(lambda found: stand_ins[found[0][0]] + found[0][1:], text)
        while length := self._prefix_at_end(text):
            start = len(text) - length
            text = text[:start] + stand_ins[text[start]] + text[start + 1 :]
        return text


def _shown(text: str, stand_ins: Mapping[str, str]) -> str:
    for char, first in stand_ins.items():  # faster than `translate`, which visits each character
        text = text.replace(char, first)
    return text


def any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of the texts at a position.

    It tries common prefixes once, because a vocabulary may have thousands of special tokens.
    """
    branches: dict[str, set[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], set()).add(text[1:])
    if not branches:
        return r"(?!)"  # never matches
    found = [re.escape(first) + _rest(branches[first]) for first in sorted(branches)]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _rest(texts: set[str]) -> str:
    if texts == {""}:
        return ""
    return f"(?:{any_of(texts)})?" if "" in texts else any_of(texts)


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
