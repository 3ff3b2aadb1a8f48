"""Checks and corrections of a grammar's text before the compiler sees it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from slipstream.runner.grammars.text import (
    MAX_GRAMMAR_CHARS,
    MAX_NESTING,
    choice_grammar,
    is_lark,
    join_surrogates,
    prepare_grammar,
)
from slipstream.runner.messages import GrammarSpec


def nested(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


def routes(pattern: str) -> dict[str, GrammarSpec]:
    """The same pattern in every kind of grammar that reaches the compiler."""
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": pattern}}
    ebnf = f"root ::= {pattern.replace('a', '[a]')}"
    schemas: dict[str, Any] = {
        "pattern": {"type": "string", "pattern": pattern},
        "deep pattern": {"anyOf": [{"items": {"pattern": pattern}}]},
        "key": {"type": "object", "patternProperties": {pattern: {}}},
    }
    return {
        "regex": GrammarSpec("regex", pattern),
        "EBNF": GrammarSpec("grammar", ebnf),
        "Lark": GrammarSpec("grammar", f"start: {pattern.replace('a', 'A')}\nA: /a/"),
        "regex in Lark": GrammarSpec("grammar", f"start: /{pattern}/"),
        "structural tag": GrammarSpec("structural_tag", json.dumps({"format": tag})),
        "grammar in a tag": GrammarSpec("structural_tag", json.dumps([{"grammar": ebnf}])),
        **{name: GrammarSpec("json_schema", json.dumps(s)) for name, s in schemas.items()},
    }


@pytest.mark.parametrize("route", routes("a"))
def test_nesting_is_bounded_on_every_route(route: str) -> None:
    for depth in (MAX_NESTING + 1, 30_000):
        with pytest.raises(ValueError, match=f"nested more than {MAX_NESTING} deep"):
            prepare_grammar(routes(nested(depth))[route])
    whole = routes(nested(MAX_NESTING))[route]
    assert prepare_grammar(whole).value == whole.value


def test_text_that_only_looks_nested_is_not_counted() -> None:
    many = "(" * 1000
    for spec in (
        GrammarSpec("regex", rf"[{many}]\({'(a)' * 1000}"),
        GrammarSpec("grammar", f'root ::= "{many}" [{many}] # {many}\n'),
        GrammarSpec("grammar", f'start: "{many}" /[{many}]/ // {many}\n'),
        GrammarSpec("json_schema", json.dumps({"const": "[" * 1000})),
    ):
        assert prepare_grammar(spec).value == spec.value


def test_a_schema_nested_too_deep_is_an_error() -> None:
    for text in ("[" * 5000 + "]" * 5000, '{"items":' * 5000):
        with pytest.raises(ValueError, match="nested more than"):
            prepare_grammar(GrammarSpec("json_schema", text))


@pytest.mark.parametrize("character", ["[", "\\", '"', "/", "(a)", "\n", "a\n", "\\ud83d\\ude00"])
def test_no_text_takes_long_to_check(character: str) -> None:
    text = character * (100_000 // len(character))
    for kind in ("regex", "grammar", "json_schema"):
        for before in ("", "start: ", "root ::= "):
            began = time.process_time()
            try:
                prepare_grammar(GrammarSpec(kind, before + text))
            except ValueError:
                pass
            assert time.process_time() - began < 2.0  # 0.3; what is quadratic takes minutes


def test_escaped_surrogate_pairs_become_the_character_they_mean() -> None:
    assert join_surrogates(r"[\ud83d\ude00-\uD83D\uDE0F]\u00e9") == r"[😀-😏]\u00e9"
    assert join_surrogates(r"\\ud83d \\\\ude00 \d") == r"\\ud83d \\\\ude00 \d"
    assert join_surrogates(r"\\\ud83d\ude00") == r"\\" + "😀"


@pytest.mark.parametrize(
    "half", [r"\ud83d", r"\ude00", r"\ude00\ud83d", r"\ud83dx", r"\u{d83d}", r"\U0000DE00"]
)
def test_half_of_a_surrogate_pair_is_an_error_on_every_route(half: str) -> None:
    for route, spec in routes(half).items():
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            pytest.fail(f"{route}: {prepare_grammar(spec)}")
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        prepare_grammar(GrammarSpec("choice", '["\\ud83d"]'))


def test_patterns_in_a_schema_are_corrected_and_the_rest_is_unchanged() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": r"^\ud83d\ude00$"}},
        "patternProperties": {r"^\ud83d\ude01": {"enum": ["é", 1.5]}},
    }
    prepared = json.loads(prepare_grammar(GrammarSpec("json_schema", json.dumps(schema))).value)
    assert prepared["properties"] == {"pattern": {"type": "string", "pattern": "^😀$"}}
    assert prepared["patternProperties"] == {"^😁": {"enum": ["é", 1.5]}}


def test_a_choice_is_written_as_ebnf() -> None:
    assert choice_grammar(["a", "😀"]) == 'root ::= "a" | "😀"'
    for wrong in ([], [""], [1]):
        with pytest.raises(ValueError, match="at least one string"):
            choice_grammar(wrong)  # type: ignore[arg-type]


def test_a_grammar_is_told_from_its_first_rule() -> None:
    assert is_lark('start: "a"') and is_lark("\n  ?start : a") and is_lark("a\n!b: c")
    assert not is_lark('root ::= "a: b"') and not is_lark("no grammar at all")


def test_a_grammar_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="longer than"):
        prepare_grammar(GrammarSpec("regex", "a" * (MAX_GRAMMAR_CHARS + 1)))
