"""Every format, well-formed or broken, gives the same calls in every chunking and loses no text."""

from __future__ import annotations

import json
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.schema import TOOL_CALL_FORMATS
from slipstream.server.tool_parsers import TOOL_PARSERS, detect_tool_parser, tool_parser_class
from slipstream.server.tool_parsers.base import (
    ContentDelta,
    Event,
    ParsedOutput,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolParser,
)
from slipstream.server.tool_parsers.forced import ForcedToolParser

from .parser_cases import ARGS, CASES, DC, FE, JN, MB, MI, PE, PW, T1, T2, TOOLS, N, W

FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def make(name: str) -> ToolParser:
    numbers = count()
    return tool_parser_class(name)(TOOLS, lambda: f"id{next(numbers)}")


def parse(parser: ToolParser, pieces: list[str]) -> ParsedOutput:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return ParsedOutput().add(events).add(parser.finish())


def cut(text: str, seed: int) -> list[str]:
    """The text in random pieces, some of them empty."""
    rng = random.Random(seed)
    at = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FLAT)
def test_a_format_in_every_chunking(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = parse(make(name), [text])
    assert whole.content == content
    assert [(call.name, call.arguments) for call in whole.tool_calls] == calls
    assert parse(make(name), list(text)) == whole
    for at in range(len(text) + 1):
        assert parse(make(name), [text[:at], text[at:]]) == whole
    for seed in range(15):
        assert parse(make(name), cut(text, seed)) == whole


FRAGMENTS = {
    name: sorted({f for text, _, _ in cases for f in (text[: len(text) // 2], text[-9:], text)})
    for name, cases in CASES.items()
}


@given(st.sampled_from(sorted(CASES)), st.data())
def test_mixtures_of_fragments_stream_as_they_parse_whole(name: str, data: st.DataObject) -> None:
    odd = st.sampled_from(['{"', "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "<", "é", "(", "="])
    piece = st.one_of(st.sampled_from(FRAGMENTS[name]), odd)
    text = "".join(data.draw(st.lists(piece, max_size=6)))
    whole = parse(make(name), [text])
    assert parse(make(name), list(text)) == whole
    assert parse(make(name), cut(text, data.draw(st.integers(0, 999)))) == whole
    if not whole.tool_calls:
        assert whole.content == text
    for call in whole.tool_calls:
        assert call.name and text.count(call.name.split(".")[0])


def test_code_after_the_tag_goes_to_the_tool_that_runs_it() -> None:
    tool = {"type": "function", "function": {"name": "code_interpreter"}}
    for code in ('print("x")\nweather.call(', "ipython.call(1)", "a"):
        for pieces in ([code], list(code)):
            parser = tool_parser_class("llama3_json")([tool])
            (call,) = parse(parser, ["<|python_tag|>", *pieces]).tool_calls
            assert call.name == "code_interpreter"
            assert json.loads(call.arguments) == {"code": code}


def test_qwen3_coder_s_values_have_the_schema_s_types() -> None:
    parameters = {
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"$ref": "#/$defs/Level"},
            "color": {"enum": ["1", "2"]},
            "count": {"enum": [1, 2]},
            "tags": {"type": ["array", "null"]},
        },
        "$defs": {"Level": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    given = {"maybe": "null", "level": "3", "color": "1", "count": "2", "tags": '["a"]', "new": "5"}
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
    parser = tool_parser_class("qwen3_coder")([tool])
    (call,) = parse(
        parser, [f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"]
    ).tool_calls
    assert json.loads(call.arguments) == {
        "maybe": None, "level": 3, "color": "1", "count": 2, "tags": ["a"], "new": "5",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek_v3"])
def test_arguments_stream_while_they_are_written(name: str) -> None:
    text = CASES[name][0][0]
    parser = make(name)
    seen = [event for char in text for event in parser.push(char)]
    starts = [e for e in seen if isinstance(e, ToolCallStart)]
    deltas = [e for e in seen if isinstance(e, ToolArgumentsDelta) and e.index == 0]
    assert starts[0] == ToolCallStart(0, "id0", "weather")
    assert len(deltas) == len(ARGS), "every character goes out as it comes"


@pytest.mark.parametrize("name", sorted(CASES))
def test_plain_text_is_not_held_back(name: str) -> None:
    parser = make(name)
    assert parser.push("Hello,") == [ContentDelta("Hello,")]
    assert parser.push(" world") == [ContentDelta(" world")]
    assert parser.finish() == []


def test_events_of_one_kind_are_merged_within_a_push() -> None:
    assert make("hermes").push(f"Hi {T1}{JN}{T2}") == [
        ContentDelta("Hi"),
        ToolCallStart(0, "id0", "now"),
        ToolArgumentsDelta(0, "{}"),
    ]


def test_ids_are_unique_and_in_the_format_that_the_model_expects() -> None:
    ids = {tool_parser_class("mistral")().make_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(i) == 9 and i.isalnum() for i in ids)
    assert len(make("hermes").make_id()) == 29
    call = parse(make("mistral"), ["[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}"]).tool_calls[0]
    assert call.id == "abc123XYZ"


def test_without_tools_any_name_is_a_call() -> None:
    parser = tool_parser_class("pythonic")()
    assert [call.name for call in parse(parser, ["[any.thing(a=1)]"]).tool_calls] == ["any.thing"]


def test_long_arguments_cost_linear_time() -> None:
    text = f'{T1}{{"name": "now", "arguments": {{"a": "{"x" * 300_000}"}}}}{T2}'
    assert len(parse(make("hermes"), [text]).tool_calls[0].arguments) == 300_009
    escaped = json.dumps(json.dumps({"a": "x" * 300_000}))
    whole = parse(make("hermes"), [f'{T1}{{"name": "now", "arguments": {escaped}}}{T2}'])
    assert json.loads(whole.tool_calls[0].arguments) == {"a": "x" * 300_000}


FORCED: list[tuple[str | None, str, str, list[tuple[str, str]]]] = [
    (None, f"[{PW}]", "", [W]),
    (None, f' [ {PW} ,\n{{"name": "now", "parameters": {{}}}} ] ', "", [W, N]),
    (None, f"[{PW[:-3]}", "", [("weather", ARGS[:-2])]),
    (None, f'[{PW}, {{"name": "we', "", [W]),  # the output was too long for the second call
    (None, '[{"name": "we', '[{"name": "we', []),
    (None, "no list", "no list", []),
    ("weather", ARGS, "", [W]),
    ("weather", f" {ARGS[:9]}", "", [("weather", ARGS[:9])]),
    ("weather", " nothing", " nothing", []),
]


@pytest.mark.parametrize(("function", "text", "content", "calls"), FORCED)
def test_forced_calls(
    function: str | None, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text), cut(text, 1)):
        parsed = parse(ForcedToolParser(function, TOOLS), pieces)
        assert parsed.content == content
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls


def test_every_registered_name_has_its_parser() -> None:
    assert TOOL_PARSERS == TOOL_CALL_FORMATS  # the choices of the flag
    for name in TOOL_PARSERS:
        assert issubclass(tool_parser_class(name), ToolParser)
    with pytest.raises(ValueError, match="Unknown tool parser 'nope'. Available: hermes"):
        tool_parser_class("nope")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        (f"{{{{ '{DC}' }}}}", "deepseek_v3"),
        (f"{MB}{MI}$NAME", "deepseek_v4"),
        (f"<｜DSML｜function_calls>{MI}$NAME", "deepseek_v32"),
        ("<|start_header_id|>ipython", "llama3_json"),
        ("<|tool_call>call:", "gemma"),
        ("<start_of_turn>model", "gemma"),
        ("[func_name1(params)]", "pythonic"),
        ("<tool_call><function=", None),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<|im_start|>", None),
        (None, None),
    ],
)
def test_the_format_is_detected_from_the_template(template: str | None, name: str | None) -> None:
    assert detect_tool_parser(template) == name
    assert detect_tool_parser(template, supports_tools=False) == "hermes"


HALF = "\\ud83d"  # as the model writes it
DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'{T1}{{"name": "weather", "arguments": "{{\\"city\\": \\"{HALF}\\"}}"}}{T2}'),
        ("hermes", f'{T1}{{"name": "we{HALF}", "arguments": {{}}}}{T2}'),
        ("qwen3_coder", f'<function=weather><parameter=days>["{HALF}"]{PE}{FE}'),
        ("qwen3_coder", f"<function=weather><parameter=days>NaN{PE}{FE}"),
        ("qwen3_coder", f"<function=weather><parameter=days>-Infinity{PE}{FE}"),
        ("qwen3_coder", f"<function=weather><parameter=days>{DEEP}{PE}{FE}"),
        ("pythonic", f'[weather(city="{HALF}", days=1)]'),
        ("pythonic", f"[weather(city={DEEP})]"),
        ("pythonic", "[weather(days=1e999)]"),
        ("gemma", f'<|tool_call>call:weather{{city:"{HALF}",days:NaN}}<tool_call|>'),
        ("gemma", f"<|tool_call>call:weather{{city:{DEEP}}}<tool_call|>"),
        ("gemma", "<|tool_call>call:weather{days:1e999}<tool_call|>"),
    ],
)
def test_any_output_becomes_encodable_text_and_valid_json(name: str, text: str) -> None:
    found = parse(make(name), [text])
    shown = found.content + "".join(call.name for call in found.tool_calls)
    shown.encode()
    assert found.content or found.tool_calls
    for call in found.tool_calls:
        call.arguments.encode()
        value = json.loads(call.arguments, parse_constant=lambda name: pytest.fail(name))
        assert isinstance(value, dict)
