"""Checks the text of grammars before the compiler sees it, and writes the grammar of a choice.

The compiler recurses over nesting, so nesting is bounded here on every route into it; and it takes
the two halves of a surrogate pair for two characters, so pairs are joined here. Nothing in this
file recurses or backtracks: clients choose what it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..messages import GrammarSpec

MAX_GRAMMAR_CHARS = 1 << 17  # longer ones can take minutes to compile
MAX_NESTING = 200  # of groups in a pattern or grammar
MAX_JSON_NESTING = 600  # of brackets; a level of a schema is up to three of them

_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*+\]?"
_STRING = r'"(?:\\.|[^"\\\n])*+"?'
_REGEX_TOKEN = re.compile(rf"\\.|{_CLASS}|[()]", re.DOTALL)
_EBNF_TOKEN = re.compile(rf"{_STRING}|{_CLASS}|#[^\n]*|[()]", re.DOTALL)
_LARK_TOKEN = re.compile(rf"{_STRING}|//[^\n]*|/(?:\\.|[^/\\\n])*+/?|[()\[\]]", re.DOTALL)
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*+"?|[{}\[\]]', re.DOTALL)
_LARK_RULE = re.compile(r"^[^\S\n]*[?!]?\w+\s*:", re.MULTILINE)
_HALF = "[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    rf"|(\\u{_HALF}|\\u\{{0*{_HALF}\}}|\\U0000{_HALF})|\\.",
    re.DOTALL,
)


def prepare_grammar(spec: GrammarSpec) -> GrammarSpec:
    """The grammar as the compiler reads it correctly; ValueError if it must not see it."""
    if len(spec.value) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"it is longer than {MAX_GRAMMAR_CHARS} characters")
    match spec.kind:
        case "json_schema" | "structural_tag":
            value = _prepare_json(spec.value)
        case "regex":
            value = _prepare_regex(spec.value)
        case "choice":
            value = choice_grammar(json.loads(spec.value))
        case "grammar":
            value = _prepare_rules(spec.value)
        case _:
            value = spec.value
    return GrammarSpec(spec.kind, value)


def is_lark(grammar: str) -> bool:
    """Whether a grammar is written as Lark's (`start: …`), not as EBNF (`root ::= …`)."""
    return "::=" not in grammar and _LARK_RULE.search(grammar) is not None


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar (EBNF) that allows exactly these strings."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice needs at least one string, and none may be empty")
    if any("\ud800" <= character <= "\udfff" for choice in choices for character in choice):
        raise ValueError("a choice holds half of a surrogate pair, which is not a character")
    # Not with JSON's own escapes: above U+FFFF those are two halves, here they would be characters.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def join_surrogates(text: str) -> str:
    """The text with escaped surrogate pairs as the characters they mean; ValueError at a half."""

    def replace(match: re.Match[str]) -> str:
        high, low, half = match.groups()
        if half is not None:
            raise ValueError(f"{half} is half of a surrogate pair, which is not a character")
        if high is None:
            return match[0]
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00))

    return _ESCAPE.sub(replace, text)


def _prepare_regex(pattern: str) -> str:
    _check_nesting(_REGEX_TOKEN, pattern)
    return join_surrogates(pattern)


def _prepare_rules(grammar: str) -> str:
    if is_lark(grammar):
        _check_nesting(_LARK_TOKEN, grammar)
        for token in _LARK_TOKEN.finditer(grammar):
            if token[0].startswith("/") and not token[0].startswith("//"):
                _check_nesting(_REGEX_TOKEN, token[0])
    else:
        _check_nesting(_EBNF_TOKEN, grammar)
    return join_surrogates(grammar)


def _prepare_json(text: str) -> str:
    """A schema or structural tag, with each pattern and grammar in it prepared."""
    _check_nesting(_JSON_TOKEN, text, MAX_JSON_NESTING)
    try:
        root = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    has_changed = False
    for holder in _objects(root):
        for name, value in list(holder.items()):
            prepared = _prepare_member(name, value)
            if prepared != value:
                holder[name], has_changed = prepared, True
    return json.dumps(root, ensure_ascii=False) if has_changed else text


def _prepare_member(name: str, value: Any) -> Any:
    """A member of an object; as "pattern" may also be a property's name, its kind decides, too."""
    if name in ("pattern", "regex") and isinstance(value, str):
        return _prepare_regex(value)
    if name in ("grammar", "ebnf") and isinstance(value, str):
        return _prepare_rules(value)
    if name == "patternProperties" and isinstance(value, dict):
        return {_prepare_regex(pattern): below for pattern, below in value.items()}
    return value


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value; what it holds is looked at after the caller changed it."""
    stack = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)


def _check_nesting(token: re.Pattern[str], text: str, most: int = MAX_NESTING) -> None:
    depth = 0
    for match in token.finditer(text):
        if match[0] in ("(", "[", "{"):
            depth += 1
            if depth > most:
                raise ValueError(f"it is nested more than {most} deep")
        elif match[0] in (")", "]", "}"):
            depth -= 1
