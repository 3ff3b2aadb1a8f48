"""Grammars: masks over drafts, and the real library over a byte vocabulary."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.grammars.text import MAX_GRAMMAR_CHARS, choice_grammar
from slipstream.runner.messages import GrammarSpec
from slipstream.runner.scheduling.kv_blocks import BlockGroup

from ..schedule_bench import Bench, ParityMatcher, fill_rows

EOS = 0
# Token 0 ends, token t is byte t, and some longer pieces follow.
VOCAB = [b"", *(bytes([byte]) for byte in range(1, 256)), b'{"', b'":', b"true", b"[]", b" }"]
VOCAB_SIZE = 320  # padded beyond the vocabulary
LINE = VOCAB_SIZE // 32


@pytest.fixture(scope="module")
def backend() -> Iterator[GrammarPool]:
    backend = build_grammar_backend(VOCAB, "raw", [EOS], VOCAB_SIZE)
    yield backend
    backend.shutdown()


def allowed(line: np.ndarray) -> set[int]:
    bits = np.unpackbits(line.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def lines_of(matcher: Any, drafts: list[int], num_lines: int) -> tuple[list[set[int]], int]:
    lines = np.full((num_lines, LINE), -1, dtype=np.int32)
    num_cut = fill_rows(matcher, drafts, lines)
    return [allowed(line) for line in lines], num_cut


def test_each_line_knows_the_drafts_before_it_and_the_matcher_ends_where_it_began() -> None:
    matcher = ParityMatcher(VOCAB_SIZE)
    (first, second, third), num_cut = lines_of(matcher, [4, 7], 3)
    assert (2 in first, 1 in first, 0 in first) == (True, False, False)
    assert (1 in second, 2 in second, 0 in second) == (True, False, False)
    assert (2 in third, 1 in third, 0 in third) == (True, False, True)
    assert num_cut == 0
    assert lines_of(matcher, [], 1)[0] == [first]


def test_drafts_are_cut_at_the_first_forbidden_one() -> None:
    matcher = ParityMatcher(VOCAB_SIZE)
    (first, second, third, fourth), num_cut = lines_of(matcher, [4, 6, 3], 4)
    assert num_cut == 2
    assert 4 in first and 6 not in second
    assert second == third == fourth


def test_a_missing_draft_cuts_and_is_not_counted() -> None:
    matcher = ParityMatcher(VOCAB_SIZE)
    (_, second, third, fourth), num_cut = lines_of(matcher, [4, -1, 6], 4)
    assert num_cut == 1  # the 6; -1 was never a draft
    assert second == third == fourth


def test_trap_14_a_placeholder_never_passes_for_a_token(backend: GrammarPool) -> None:
    matcher = backend.compile(GrammarSpec("regex", "a+")).result()
    for token_id in (-1, VOCAB_SIZE):
        with pytest.raises(ValueError, match="not a valid token id"):
            matcher.accept(token_id)


def test_the_library_masks_the_padding_and_what_the_regex_forbids(backend: GrammarPool) -> None:
    matcher = backend.compile(GrammarSpec("regex", "ab?")).result()
    a, b = ord("a"), ord("b")
    lines, num_cut = lines_of(matcher, [a, b, EOS], 4)
    assert lines[:3] == [{a}, {b, EOS}, {EOS}]
    assert num_cut == 0
    assert not matcher.accept(b)
    assert matcher.accept(a) and matcher.accept(EOS) and matcher.is_terminated
    assert not matcher.accept(a)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (GrammarSpec("json_schema", '{"type": 3}'), "."),
        (GrammarSpec("json_schema", "{no json"), "."),
        (GrammarSpec("regex", "(a"), "."),
        (GrammarSpec("grammar", "root ::= nowhere"), "."),
        (GrammarSpec("grammar", "start: nowhere"), "nowhere"),
        (GrammarSpec("grammar", "no grammar at all"), "."),
        (GrammarSpec("choice", "[]"), "at least one"),
        (GrammarSpec("telepathy", ""), "telepathy"),
    ],
)
def test_an_invalid_grammar_is_a_value_error(
    backend: GrammarPool, spec: GrammarSpec, word: str
) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        backend.compile(spec).result(timeout=30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "SELECT " name ("," name)*\nname ::= [a-c]',
        '?start: "SELECT " NAME ("," NAME)* // comment\nNAME: /[a-c]/\n',
        'start: list\nlist: "SELECT " item\nitem: NAME | item "," NAME\nNAME: "a".."c"',
    ],
)
def test_a_grammar_may_be_ebnf_or_lark(backend: GrammarPool, grammar: str) -> None:
    def accepts(text: bytes) -> bool:
        matcher = backend.compile(GrammarSpec("grammar", grammar)).result(timeout=30)
        return all(map(matcher.accept, text)) and matcher.accept(EOS)

    assert accepts(b"SELECT a") and accepts(b"SELECT a,c,b")
    assert not accepts(b"SELECT d") and not accepts(b"SELECT a,") and not accepts(b"SELECT")


def test_a_choice_allows_its_strings_whatever_they_contain(backend: GrammarPool) -> None:
    choices = ['say "hi"', "tab\there", "line\nbreak", "é\\", "😀", "a\U0010ffff\u2028", "\x01\x7f"]
    spec = GrammarSpec("choice", json.dumps(choices))
    for choice in choices:
        matcher = backend.compile(spec).result()
        assert all(matcher.accept(byte) for byte in choice.encode())
        assert matcher.accept(EOS)
    assert choice_grammar(["a"]) == 'root ::= "a"'


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", r"[\ud83d\ude00]"),
        GrammarSpec("grammar", r'root ::= "\ud83d\ude00"'),
        GrammarSpec("grammar", r"start: /\ud83d\ude00/"),
        GrammarSpec("json_schema", json.dumps({"enum": ["😀"]}, ensure_ascii=True)),
        GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": r"^\ud83d\ude00$"})),
    ],
)
def test_a_surrogate_pair_is_one_character(backend: GrammarPool, spec: GrammarSpec) -> None:
    text = '"😀"' if spec.kind == "json_schema" else "😀"
    matcher = backend.compile(spec).result(timeout=30)
    assert all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        backend.compile(GrammarSpec("regex", r"\ud83d")).result(timeout=30)


def test_many_may_compile_at_once(backend: GrammarPool) -> None:
    with ThreadPoolExecutor(4) as pool:
        specs = [GrammarSpec("regex", f"[a-c]{{{n}}}") for n in (1, 2, 3, 1, 2, 3)]
        futures = list(pool.map(backend.compile, specs))
    assert all(future.result(timeout=30).accept(ord("b")) for future in futures)


SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"enum": ["red", "green", 'b"lue']},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    },
    {"type": "null"},
    {"const": {"a": [1, 2]}},
]


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return bool(value == schema["const"])
    if schema["type"] == "array":
        return 1 <= len(value) <= 3 and all(isinstance(item, bool) for item in value)
    if schema["type"] == "object":
        return set(value) == {"ok", "kind"} and isinstance(value["ok"], bool)
    return value is None if schema["type"] == "null" else isinstance(value, bool)


def test_trap_14_every_answer_fits_its_schema_through_drafts_preemption_and_reordering(
    backend: GrammarPool,
) -> None:
    specs = [GrammarSpec("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    kept = [backend.compile(spec).result(timeout=30) for spec in specs]  # no request waits
    preemptions = 0
    for seed in range(4):
        bench = Bench(
            groups=(BlockGroup(76, 4),),
            max_model_len=300,
            num_drafts=3,
            draft_accuracy=0.5,
            vocab_size=VOCAB_SIZE,
            seed=seed,
            max_num_seqs=6,
        )
        bench.engine.set_grammar_backend(backend)
        schemas = {f"r{n}": SCHEMAS[n % len(SCHEMAS)] for n in range(12)}
        for name, schema in schemas.items():
            spec = GrammarSpec("json_schema", json.dumps(schema))
            prompt = [int(name[1:]) + 1, seed + 1, *range(1, 14)]
            bench.add(name, prompt, max_tokens=280, grammar=spec, priority=int(name[1:]) % 3)
        for name in ("free", "more"):  # together they need more blocks than there are
            bench.add(name, [1, 2, 3], max_tokens=250, stop_token_ids=[])
        bench.run()
        preemptions += bench.totals.num_preemptions
        for name, schema in schemas.items():
            assert bench.received[name].finish_reason == "stop"
            text = b"".join(VOCAB[token] for token in bench.received[name].token_ids[:-1])
            assert is_valid(json.loads(text), schema), text
    assert preemptions > 0
    del kept


def test_a_json_object_is_an_object_of_any_shape(backend: GrammarPool) -> None:
    for text, is_object in (
        ('{"a":[1,{}],\n        "b": null}', True),
        ("[1]", False),
        ("3", False),
    ):
        matcher = backend.compile(GrammarSpec("json_object")).result()
        assert all(matcher.accept(byte) for byte in text.encode()) == is_object


def test_blanks_in_json_are_bounded(backend: GrammarPool) -> None:
    matcher = backend.compile(GrammarSpec("json_object")).result()
    assert matcher.accept(ord("{"))
    accepted = 0
    while matcher.accept(ord(" ")):
        accepted += 1
        assert accepted < 100
    assert accepted >= 8


def test_a_number_follows_its_pattern(backend: GrammarPool) -> None:
    bench = Bench(num_drafts=2, vocab_size=VOCAB_SIZE)
    bench.engine.set_grammar_backend(backend)
    bench.add("a", [1, 2, 3], max_tokens=30, grammar=GrammarSpec("regex", "[0-9]{3}-[0-9]{2}"))
    bench.run()
    text = bytes(bench.received["a"].token_ids[:-1]).decode()
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", text)


def test_a_grammar_that_no_text_satisfies_is_an_error(backend: GrammarPool) -> None:
    for spec in (
        GrammarSpec("json_schema", '{"$ref": "#"}'),
        GrammarSpec("grammar", 'root ::= root "a"'),
    ):
        with pytest.raises(ValueError, match="no text satisfies it"):
            backend.compile(spec).result(timeout=30)


def test_a_grammar_too_long_to_compile_in_time_is_an_error(backend: GrammarPool) -> None:
    spec = GrammarSpec("regex", "a" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(ValueError, match="longer"):
        backend.compile(spec).result(timeout=30)


def test_an_error_does_not_show_the_librarys_files(backend: GrammarPool) -> None:
    with pytest.raises(ValueError, match="^Regex parsing error") as caught:
        backend.compile(GrammarSpec("regex", "(?=a)b")).result(timeout=30)
    assert ".cc" not in str(caught.value)


def test_python_runs_on_while_a_grammar_compiles(backend: GrammarPool) -> None:
    """The engine's thread needs the GIL at every step."""
    names = [f"k{n}" for n in range(400)]
    properties = {name: {"type": "string", "pattern": "^[a-z]{3,20}$"} for name in names}
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": properties}))
    backend.prepare()
    start = last = time.perf_counter()
    longest, future = 0.0, backend.compile(spec)
    while not future.done():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert future.result().accept(ord("{"))
    assert longest < (last - start) / 2


def test_a_repeated_grammar_is_compiled_once(backend: GrammarPool) -> None:
    properties = {f"p{n}": {"type": "integer"} for n in range(300)}
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": properties}))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        backend.compile(spec).result(timeout=60)
        seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < seconds[0] / 4
