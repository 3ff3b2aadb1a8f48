"""Rewrites patterns for the grammar compiler, and tests what they match in bounded time.

The compiler matches whole strings, does not escape quotes and backslashes in them, and ignores
anchors inside a pattern. The rewritten patterns therefore have no anchors, and match the JSON text
of a string instead of the string.
"""

from __future__ import annotations

from functools import lru_cache

from .regex_syntax import (
    Alt,
    Anchor,
    Chars,
    Node,
    Ranges,
    RegexError,
    Repeat,
    Seq,
    complement,
    parse_regex,
    union,
)
from .shape import Budget

_SURROGATES = (0xD800, 0xDFFF)
# Characters that a JSON string can contain only as escapes.
_ESCAPED = union([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES])
_UNESCAPED = r'[^"\\\x00-\x1f]'
_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_SPECIAL = set("^$.*+?\\()[]{}|/-")
_MAX_STATES = 2000  # of an automaton of ours
_MAX_NAME = 256  # characters of a property's name that `may_match` searches
_MAX_TOTAL = 10_000_000  # nodes of a pattern with its counted repetitions written out
# Matches only the empty text, and keeps the compiler from turning the pattern into a single
# automaton. Its automata miscount repeated groups, cannot express long repetitions, and leave out
# characters that must be escaped.
_NO_AUTOMATON = "é{0}"


@lru_cache(maxsize=256)
def json_pattern(text: str) -> str:
    """Rewrite a pattern to match the JSON text between the quotes of a string.

    Raises RegexError if the pattern cannot be enforced or matches nothing."""
    body = _compiler_pattern(whole_regex(text))
    if body is None:
        raise RegexError("matches nothing")
    return f"^{body}{_NO_AUTOMATON}$"


@lru_cache(maxsize=256)
def length_pattern(low: int, high: int | None) -> str:
    """A pattern for the JSON text of strings with `low` to `high` characters (None: no limit).

    It allows only characters that need no escape in JSON. The compiler counts a single character
    class fast, but with escapes in it, each mask of a string of up to 200 characters took half a
    second.
    """
    return f"^{_UNESCAPED}{{{low},{'' if high is None else high}}}{_NO_AUTOMATON}$"


def whole_regex(text: str) -> Node:
    """The syntax tree, without anchors, of a pattern that must match a whole text.

    Raises RegexError if it is invalid or unsupported (see `parse_regex`), has an anchor where the
    text cannot start or end, or expands to too many nodes."""
    node = _without_anchors(parse_regex(text), True, True)
    if _total(node) > _MAX_TOTAL:
        raise RegexError("repeats too much")
    return node


def _without_anchors(node: Node, starts: bool, ends: bool) -> Node:
    """Remove `^` and `$` where the node starts or ends the whole text; elsewhere, RegexError."""
    match node:
        case Anchor(at_start):
            if not (starts if at_start else ends):
                raise RegexError("has an anchor inside")
            return Seq(())
        case Alt(branches):
            return Alt(tuple(_without_anchors(each, starts, ends) for each in branches))
        case Seq(parts):
            found = list(parts)
            first = 0
            while first < len(found) and found[first] == Anchor(True) and starts:
                first += 1
            last = len(found)
            while last > first and found[last - 1] == Anchor(False) and ends:
                last -= 1
            inner = found[first:last]
            return Seq(
                tuple(
                    _without_anchors(each, starts and not number, ends and number == len(inner) - 1)
                    for number, each in enumerate(inner)
                )
            )
        case Repeat(part, low, high):
            return Repeat(_without_anchors(part, False, False), low, high)
    return node


def _total(node: Node) -> int:
    match node:
        case Alt(parts) | Seq(parts):
            return sum(map(_total, parts)) + 1
        case Repeat(part, low, high):
            return _total(part) * max(low, high or 0, 1)
    return 1


def _compiler_pattern(node: Node) -> str | None:
    """The compiler's pattern for a tree; None if it matches nothing."""
    match node:
        case Chars(ranges):
            return _chars(ranges)
        case Seq(parts):
            written = [_compiler_pattern(part) for part in parts]
            return None if None in written else "".join(filter(None, written))
        case Alt(branches):
            able = [each for each in map(_compiler_pattern, branches) if each is not None]
            return f"(?:{'|'.join(able)})" if able else None
        case Repeat(part, low, high):
            inner = _compiler_pattern(part)
            if not inner:
                return inner if low else ""
            alone = inner[0] == "[" or len(inner.removeprefix("\\")) == 1
            if not (alone and isinstance(part, Chars)):
                inner = f"(?:{inner})"
            if high is None and low < 2:
                return inner + "*+"[low]
            return inner + f"{{{low},{'' if high is None else high}}}"
    raise AssertionError(node)


@lru_cache(maxsize=1024)
def _chars(ranges: Ranges) -> str | None:
    forms = _plain(_common(ranges, complement(_ESCAPED)))
    escaped = _common(ranges, _ESCAPED)
    codes = [code for low, high in escaped for code in range(low, min(high, 0x5C) + 1)]
    short = [code for code in codes if code in _SHORT]
    if short:
        forms += ["\\\\" + _literal(_SHORT[code]) for code in short]
    elif not forms:
        forms = [f"\\\\u{code:04x}" for code in codes if code < 0x20]
    if not forms:
        return None
    return forms[0] if len(forms) == 1 else f"(?:{'|'.join(forms)})"


def _plain(ranges: Ranges) -> list[str]:
    """Alternatives of a pattern for characters that need no escape in JSON.

    A character with a special meaning never ends a range inside a class, because the compiler drops
    escapes in classes.
    """
    inside: list[str] = []
    alone: list[str] = []
    for low, high in ranges:
        while low <= high and chr(low) in _SPECIAL:
            alone.append(_literal(chr(low)))
            low += 1
        last: list[str] = []
        while low <= high and chr(high) in _SPECIAL:
            last.append(_literal(chr(high)))
            high -= 1
        if low == high:
            inside.append(chr(low))
        elif low < high:
            inside.append(f"{chr(low)}-{chr(high)}")
        alone += last
    if not inside:
        return alone
    one = len(inside) == 1 and len(inside[0]) == 1
    return [inside[0] if one else f"[{''.join(inside)}]", *alone]


def _literal(char: str) -> str:
    return "\\" + char if char in _SPECIAL else char


def _common(ours: Ranges, theirs: Ranges) -> Ranges:
    found = []
    for low, high in ours:
        for other_low, other_high in theirs:
            if max(low, other_low) <= min(high, other_high):
                found.append((max(low, other_low), min(high, other_high)))
    return tuple(sorted(found))


# --- what a pattern matches -------------------------------------------------------------------


def may_match(pattern: str, text: str, budget: Budget) -> bool:
    """Whether a pattern matches somewhere in a text.

    True if that cannot be decided cheaply, or if the pattern is invalid or unsupported. Raises
    SchemaError if the `budget` is exceeded."""
    try:
        automaton = _automaton(pattern)
    except RegexError:
        return True
    if automaton is None or len(text) > _MAX_NAME:
        return True
    budget.spend(1 + len(text) * len(automaton.steps) // 100)
    return automaton.finds(text)


def are_apart(first: str, second: str) -> bool:
    """Whether the patterns demand different beginnings, so that no string matches both.

    False if that cannot be proved, also because a pattern is invalid or unsupported."""
    try:
        ours, theirs = _beginning(first), _beginning(second)
    except RegexError:
        return False
    return any(not _common(a, b) for a, b in zip(ours, theirs, strict=False))


def _beginning(pattern: str) -> list[Ranges]:
    """The characters allowed at each of the first positions of a string that matches.

    Empty if the pattern does not start with `^`; it ends at the first part of variable length.
    Raises RegexError if the pattern is invalid or unsupported."""
    node = parse_regex(pattern)
    parts = list(node.parts) if isinstance(node, Seq) else [node]
    if not parts or parts[0] != Anchor(True):
        return []
    found: list[Ranges] = []
    for part in parts[1:]:
        if isinstance(part, Repeat) and isinstance(part.part, Chars) and part.low:
            found.append(part.part.ranges)
            return found
        if not isinstance(part, Chars):
            break
        found.append(part.ranges)
    return found


class _Automaton:
    """A nondeterministic automaton of a pattern.

    A state is (condition, next states): it consumes a character of the ranges, or none if the
    condition is an anchor or None."""

    def __init__(self) -> None:
        self.steps: list[tuple[Ranges | Anchor | None, list[int]]] = [(None, [])]  # 0: accepting
        self.start = 0

    def add(self, need: Ranges | Anchor | None, targets: list[int]) -> int:
        if len(self.steps) >= _MAX_STATES:
            raise OverflowError
        self.steps.append((need, targets))
        return len(self.steps) - 1

    def build(self, node: Node, after: int) -> int:
        """Add the states that match `node` and continue at `after`; returns the first of them.

        Raises OverflowError if there are too many."""
        match node:
            case Chars(ranges):
                return self.add(ranges, [after])
            case Anchor():
                return self.add(node, [after])
            case Seq(parts):
                for part in reversed(parts):
                    after = self.build(part, after)
                return after
            case Alt(branches):
                return self.add(None, [self.build(each, after) for each in branches])
            case Repeat(part, low, high):
                if high is None:
                    loop = self.add(None, [after])
                    self.steps[loop][1].append(self.build(part, loop))
                    after = loop
                else:
                    end = after
                    for _ in range(high - low):
                        after = self.add(None, [end, self.build(part, after)])
                for _ in range(low):
                    before, after = after, self.build(part, after)
                    if after == before:  # the part is empty
                        break
                return after

    def finds(self, text: str) -> bool:
        """Whether the pattern matches somewhere in `text`."""
        states: set[int] = set()
        for at in range(len(text) + 1):
            states = self._reached({*states, self.start}, at == 0, at == len(text))
            if 0 in states:
                return True
            if at < len(text):
                states = self._after(states, ord(text[at]))
        return False

    def _reached(self, states: set[int], at_start: bool, at_end: bool) -> set[int]:
        stack = list(states)
        while stack:
            need, targets = self.steps[stack.pop()]
            if isinstance(need, tuple):
                continue
            if isinstance(need, Anchor) and not (at_start if need.at_start else at_end):
                continue
            stack += [each for each in targets if each not in states]
            states.update(targets)
        return states

    def _after(self, states: set[int], code: int) -> set[int]:
        found: set[int] = set()
        for state in states:
            need, targets = self.steps[state]
            if isinstance(need, tuple) and any(low <= code <= high for low, high in need):
                found.update(targets)
        return found


@lru_cache(maxsize=64)
def _automaton(pattern: str) -> _Automaton | None:
    """The pattern's automaton; None if it has too many states. Raises RegexError."""
    automaton = _Automaton()
    try:
        automaton.start = automaton.build(parse_regex(pattern), 0)
    except OverflowError:
        return None
    return automaton
