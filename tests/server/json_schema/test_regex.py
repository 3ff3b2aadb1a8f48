"""Patterns of clients: parsed as JSON Schema defines them, rewritten for the compiler."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
import xgrammar as xgr

from slipstream.server.json_schema.regex_syntax import HalfSurrogate, RegexError, join_surrogates
from slipstream.server.json_schema.regex_text import are_apart, json_pattern, may_match
from slipstream.server.json_schema.shape import Budget

from ..grammar_walks import END, byte_compiler, compiled_schema

ATOMS = ["a", "b", "0", "[ab]", "[0-9]", "[^a]", ".", r"\d", r"\w", "é", r"\.", '"', r"\\"]
COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{1,6}"]
TEXTS = ["".join(each) for n in range(5) for each in itertools.product('a0.é"\\', repeat=n)]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if not depth or kind < 0.35:
        return rng.choice(ATOMS)
    parts = [random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind < 0.6:
        return "".join(parts)
    if kind < 0.75:
        return f"(?:{'|'.join(parts)})"
    return f"(?:{parts[0]})" + rng.choice(COUNTS)


def matches(grammar: Any, text: str) -> bool:
    matcher = xgr.GrammarMatcher(grammar)
    written = json.dumps(text, ensure_ascii=False)
    return matcher.accept_string(written) and matcher.accept_token(END)


def test_random_patterns_match_the_same_texts_as_in_python() -> None:
    compiler, rng = byte_compiler(), random.Random(7)
    for _ in range(60):
        pattern = f"^{random_pattern(rng, 3)}$"
        grammar = compiled_schema(compiler, {"type": "string", "pattern": json_pattern(pattern)})
        known = re.compile(pattern, re.ASCII)
        for text in rng.sample(TEXTS, 60):
            assert matches(grammar, text) == bool(known.fullmatch(text)), (pattern, text)


def test_searches_find_the_same_as_in_python() -> None:
    rng = random.Random(8)
    for _ in range(200):
        pattern = rng.choice(["", "^"]) + random_pattern(rng, 3) + rng.choice(["", "$"])
        known = re.compile(pattern, re.ASCII)
        for text in rng.sample(TEXTS, 20):
            found = may_match(pattern, text, Budget(10_000))
            assert found == bool(known.search(text)), (pattern, text)


def test_a_search_never_runs_long() -> None:
    assert (
        may_match("^(a+)+$", "a" * 200 + "!", Budget(10_000)) is False
    )  # Python's search takes forever
    assert may_match("(?=a)b", "x", Budget(1)) is True, "undecided"
    assert may_match("(?:a{1000}){1000}", "x", Budget(1)) is True


def test_patterns_with_different_beginnings_are_apart() -> None:
    assert are_apart("^S_", "^I_") and are_apart("^foo_[0-9]", "^far")
    assert not are_apart("^S", "^S_") and not are_apart("S_", "^I_") and not are_apart("(", "^I_")


EMOJI = r"\ud83d\ude00"


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (EMOJI, "😀"),
        (f"[{EMOJI}-{EMOJI.replace('00', '4f')}]+", "[😀-🙏]+"),
        (r"\\ud83d", r"\\ud83d"),  # an escaped backslash does not start an escape
        (rf"\\{EMOJI}", r"\\😀"),
        (r"\u00e9\u{1F600}", r"\u00e9\u{1F600}"),
        (f'root ::= "{EMOJI}" | [a{EMOJI}]', 'root ::= "😀" | [a😀]'),
    ],
)
def test_pairs_of_escapes_become_one_character(given: str, whole: str) -> None:
    assert join_surrogates(given) == whole


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ude00\ud83d", r"\u{d83d}", r"a\uD83Dx"])
def test_half_a_pair_is_refused(half: str) -> None:
    with pytest.raises(HalfSurrogate, match="half of a surrogate pair"):
        join_surrogates(half)
    with pytest.raises(RegexError, match="half of a surrogate pair"):
        json_pattern(half)


def test_a_pair_in_a_pattern_is_the_character() -> None:
    compiler = byte_compiler()
    for pattern in (f"^{EMOJI}$", f"^[{EMOJI}a]$", f"^[{EMOJI}-{EMOJI.replace('00', '4f')}]$"):
        grammar = compiled_schema(compiler, {"type": "string", "pattern": json_pattern(pattern)})
        assert matches(grammar, "😀") and not matches(grammar, "�")


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "a**", "a{2}{3}", "{2}", "*a", "[", "[]", "[b-a]", "a{3,1}", "\\", "(?i)a"),
        *("(?!a)", r"\u{110000}", "^*", "x^", "$x", r"\z", "(" * 51 + ")" * 51, "a" * 8001),
        "(?:(?:a{1000}){1000}){1000}",
    ],
)
def test_invalid_and_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        json_pattern(pattern)
