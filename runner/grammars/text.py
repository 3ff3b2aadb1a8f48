"""Checks and normalises grammar text before the compiler sees it, and writes grammars of choices.

The compiler recurses over nesting, so this file bounds the nesting in every kind of grammar. The
compiler also reads the two halves of a surrogate pair as two characters, so they are joined here.
Clients choose the text, so nothing in this file recurses or backtracks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..messages import GrammarSpec

MAX_GRAMMAR_CHARS = 1 << 17  # a longer grammar can take minutes to compile
MAX_NESTING = 200  # depth of groups in a pattern or grammar
MAX_JSON_NESTING = 600  # depth of brackets; one level of a schema uses up to three

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
    """Rewrite a grammar so that the compiler reads it correctly.

    Raises ValueError if the compiler must not see it: it is malformed, too long or too deep.
    """
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
    """True for Lark syntax (`start: …`), False for EBNF (`root ::= …`)."""
    return "::=" not in grammar and _LARK_RULE.search(grammar) is not None


def choice_grammar(choices: Sequence[str]) -> str:
    """An EBNF grammar that allows exactly these strings."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice needs at least one string, and none may be empty")
    if any("\ud800" <= character <= "\udfff" for choice in choices for character in choice):
        raise ValueError("a choice holds half of a surrogate pair, which is not a character")
    # No \u escapes: JSON writes characters above U+FFFF as two halves, which EBNF reads as two.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def join_surrogates(text: str) -> str:
    """Replace escaped surrogate pairs with their characters. Raises ValueError at a lone half."""

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
    """Prepare every pattern and grammar in a schema or structural tag."""
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
    """Prepare one member of a JSON object if its name and type make it a pattern or grammar.

    The type matters because a property may also be called "pattern".
    """
    if name in ("pattern", "regex") and isinstance(value, str):
        return _prepare_regex(value)
    if name in ("grammar", "ebnf") and isinstance(value, str):
        return _prepare_rules(value)
    if name == "patternProperties" and isinstance(value, dict):
        return {_prepare_regex(pattern): below for pattern, below in value.items()}
    return value


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, visiting its members after the caller has changed it."""
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
