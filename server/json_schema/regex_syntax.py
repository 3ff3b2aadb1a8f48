"""Parses the regular expressions of clients, and rejects what a grammar cannot express.

The dialect is ECMAScript's with Unicode, as in JSON Schema. Lookaround, backreferences, word
boundaries, flags and character properties are rejected, because the compiler misreads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LAST = 0x10FFFF
MAX_NESTING = 50
MAX_PATTERN = 8_000  # characters
MAX_REPEAT = 1_000_000
MAX_RANGES = 500  # ranges in a character class

Ranges = tuple[tuple[int, int], ...]  # inclusive code points; sorted and not adjacent


class RegexError(ValueError):
    """A pattern cannot be enforced; the text is the predicate of a sentence about the pattern."""


class HalfSurrogate(RegexError):
    """A pattern contains half of a surrogate pair, which is not a character."""

    def __init__(self) -> None:
        super().__init__("contains half of a surrogate pair, which is not a character")


@dataclass(frozen=True)
class Chars:
    """Matches one character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Anchor:
    """Matches the start of the text (`^`) or its end (`$`)."""

    at_start: bool


@dataclass(frozen=True)
class Seq:
    """Matches its parts one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """Matches any one of its branches."""

    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Matches a part `low` to `high` times; None is no upper limit."""

    part: Node
    low: int
    high: int | None


Node = Chars | Anchor | Seq | Alt | Repeat


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """Sort the ranges and join those that overlap or are adjacent."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """The ranges of all other code points."""
    found, start = [], 0
    for low, high in ranges:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        found.append((start, LAST))
    return tuple(found)


def _of(text: str) -> Ranges:
    return union([(ord(char), ord(char)) for char in text])


_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACES = union(
    [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
    + [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_SETS |= {name.upper(): complement(ranges) for name, ranges in _SETS.items()}
_ANY = complement(_of("\n\r\u2028\u2029"))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")


def parse_regex(text: str) -> Node:
    """The syntax tree of a pattern; raises RegexError if the pattern is invalid or unsupported."""
    if len(text) > MAX_PATTERN:
        raise RegexError(f"is longer than {MAX_PATTERN} characters")
    reader = _Reader(text)
    node = reader.alternatives(0)
    if reader.at < len(text):
        raise RegexError("has an unmatched ')'")
    return node


class _Reader:
    """A recursive-descent parser; `at` is the index of the next character in `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise RegexError("ends unexpectedly")
        self.at += 1
        return char

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise RegexError(f"is nested more than {MAX_NESTING} deep")
        branches = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self, depth: int) -> Node:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                group = _GROUP.match(self.text, self.at)
                if group is None:
                    raise RegexError("uses lookaround or flags")
                self.at = group.end()
            inner = self.alternatives(depth + 1)
            if self._next() != ")":
                raise RegexError("has an unclosed group")
            return inner
        if char in "^$":
            return Anchor(char == "^")
        if char == ".":
            return Chars(_ANY)
        if char == "[":
            return Chars(self._class())
        if char == "\\":
            return Chars(self._escape())
        if char in "*+?" or _COUNT.match(self.text, self.at - 1):
            raise RegexError(f"has nothing to repeat before {char!r}")
        return Chars(_of(char))

    def _repeated(self, node: Node) -> Node:
        char, found = self._peek(), _COUNT.match(self.text, self.at)
        if char and char in "*+?":
            self.at += 1
            low, high = int(char == "+"), 1 if char == "?" else None
        elif found:
            self.at = found.end()
            low = int(found[1])
            high = low if found[2] is None else int(found[3]) if found[3] else None
        else:
            return node
        if isinstance(node, Anchor):
            raise RegexError("repeats an anchor")
        if (high is not None and low > high) or max(low, high or 0) > MAX_REPEAT:
            raise RegexError("has a repetition out of range")
        self.at += self._peek() == "?"  # a lazy repetition matches the same texts
        if self._peek() in ("*", "+", "?") or _COUNT.match(self.text, self.at):
            raise RegexError("repeats a repetition")
        return Repeat(node, low, high)

    def _escape(self, in_class: bool = False) -> Ranges:
        hexadecimal = _HEX.match(self.text, self.at)
        if hexadecimal:
            self.at = hexadecimal.end()
            code = int(next(filter(None, hexadecimal.groups())), 16)
            code = self._whole(code)
            return ((code, code),)
        char = self._next()
        if char in _SETS:
            return _SETS[char]
        if char in _CONTROLS and not (char == "0" and self._peek().isdigit()):
            return ((_CONTROLS[char], _CONTROLS[char]),)
        if char == "b" and in_class:
            return ((8, 8),)
        if char.isascii() and char.isalnum():
            raise RegexError(f"uses '\\{char}'")
        return _of(char)

    def _whole(self, code: int) -> int:
        """The code point of an escape; reads the second escape too if this is half of a pair."""
        if code > LAST:
            raise RegexError("names a character that does not exist")
        if not 0xD800 <= code < 0xE000:
            return code
        low = _LOW.match(self.text, self.at)
        if code >= 0xDC00 or low is None:
            raise HalfSurrogate
        self.at = low.end()
        return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00

    def _class(self) -> Ranges:
        negated = self._peek() == "^"
        self.at += negated
        found: list[tuple[int, int]] = []
        while self._peek() != "]":
            first = self._member()
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._member()
                if first[0][0] != first[-1][1] or last[0][0] != last[-1][1]:
                    raise RegexError("has a range between sets of characters")
                if last[0][0] < first[0][0]:
                    raise RegexError("has a range out of order")
                found.append((first[0][0], last[0][0]))
            else:
                found.extend(first)
        self.at += 1
        if not found or len(found) > MAX_RANGES:
            raise RegexError("has a character class that is empty or too large")
        return complement(union(found)) if negated else union(found)

    def _member(self) -> Ranges:
        char = self._next()
        return self._escape(in_class=True) if char == "\\" else _of(char)


_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2}|u\{0*[dD][89a-fA-F][0-9a-fA-F]{2}\})|.)",
    re.DOTALL,
)


def join_surrogates(text: str) -> str:
    """Replace each pair of surrogate escapes in a pattern or grammar by the character it encodes.

    The compiler would treat each half as a character. Raises HalfSurrogate for a half without its
    other half.
    """

    def whole(found: re.Match[str]) -> str:
        if found[3]:
            raise HalfSurrogate
        if not found[1]:
            return found[0]
        return chr(0x10000 + ((int(found[1], 16) - 0xD800) << 10) + int(found[2], 16) - 0xDC00)

    return _ESCAPE.sub(whole, text)
