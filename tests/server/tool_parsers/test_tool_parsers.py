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

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
ARGS = '{"city": "Kö}ln \\"x\\"",  "days":[1, {"a": null}]}'
W, N = ("weather", ARGS), ("now", "{}")
W2 = ("weather", '{"city": "Köln", "days": 3}')
T1, T2 = "<tool_call>", "</tool_call>"
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DC, DSEP, DCE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MB, ME = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
MI, MIE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
MP, MPE = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
MW = f'{MI}weather">\n{MP}city" string="true">Kö"}}\n{MPE}\n{MP}days" string="false"> 3{MPE}\n{MIE}'
MN = f'{MI}now">\n{MIE}'
JW, JN = f'{{"name": "weather", "arguments": {ARGS}}}', '{"name": "now", "arguments": {}}'
PW = f'{{"name": "weather", "parameters": {ARGS}}}'
Q = '<|"|>'
PE, FE = "</parameter>", "</function>"
XW = (
    "<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
    + PE
    + "\n"
    + FE
)
XN = "<function=now>\n</function>"
XP, XQ, XD = "<function=w><parameter=", "<parameter=", "<function=weather><parameter=days>"

# format -> (text, content, calls)
CASES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        (f"{T1}\n{JW}\n{T2}", "", [W]),
        (f"Sure. \n{T1}{JW}{T2}\n{T1}\n{JN}\n{T2}\n", "Sure.", [W, N]),
        (f'{T1}{{"arguments": {ARGS}, "name": "weather"}}\n{T2} done', " done", [W]),
        (f'{T1}{{"name": "now"}}{T2}', "", [N]),
        (f'{T1}{{"name": "now", "arguments": null}}{T2}', "", [N]),
        (f'{T1}{{"name":"now","arguments":{{"a":"{T2}"}}}}{T2}', "", [("now", f'{{"a":"{T2}"}}')]),
        (f'{T1}{{"name": "now", "arguments": "{{\\"a\\": 1}}"}}{T2}', "", [("now", '{"a": 1}')]),
        (f'{T1}{{"name": "now", "arguments": {{}}, "id": "7"}}{T2}x', "x", [N]),
        (f'{T1}{{"name": "now", "arguments": {{}}{T2}x', "x", [N]),
        (f'{T1}{{"name": "now", "arguments": {{"a": [1{T2}x', "x", [("now", '{"a": [1')]),
        (f'{T1}{{"name": "weather", "arguments": {{"city": "Kö', "", [("weather", '{"city": "Kö')]),
        (f'{T1}{{"name": "now", "arguments": {{}}, bad}}{T2}x', f", bad}}{T2}x", [N]),
        (f"a {T1} not json {T2} b", f"a {T1} not json {T2} b", []),
        (f"{T1}{{'name': 'x'}}{T2}", f"{T1}{{'name': 'x'}}{T2}", []),
        (f'{T1}{{"name": "", "arguments": {{}}}}', f'{T1}{{"name": "", "arguments": {{}}}}', []),
        (f'{T1}{{"name": "x", "arguments": 5}}', f'{T1}{{"name": "x", "arguments": 5}}', []),
        (f'{T1}{{"arguments": {{}}}}{T2}', f'{T1}{{"arguments": {{}}}}{T2}', []),
        (f'{T1}{{"name": "no', f'{T1}{{"name": "no', []),
        (f"{T1}{{bad}}{T2} {T1}{JN}{T2}", f"{T1}{{bad}}{T2}", [N]),
        ("plain <b>text</b> <tool_cal\n ", "plain <b>text</b> <tool_cal\n ", []),
        ("", "", []),
    ],
    "llama3_json": [
        (PW, "", [W]),
        (f"\n<|python_tag|>{PW}; {PW}", "", [W, W]),
        (f"{PW}\n{JN}", "", [W, N]),
        (f'{{"type": "function", {PW[1:]}', "", [W]),
        (f"I look. <|python_tag|>{PW} ok", "I look. ok", [W]),
        ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
        ('{"name": "now"}', '{"name": "now"}', []),
        (PW.replace("weather", "unknown"), PW.replace("weather", "unknown"), []),
        ('<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        ("{x} " + PW, "{x} " + PW, []),
        ('<|python_tag|>weather.call(city="Köln", days=3)', "", [W2]),
        ('Ok <|python_tag|>weather.call(city="Köln", days=3) ', "Ok", [W2]),
        ('<|python_tag|>other.call(a="b")', '<|python_tag|>other.call(a="b")', []),
        ("<|python_tag|>weather.call(city=f())", "<|python_tag|>weather.call(city=f())", []),
        ("<|python_tag|>weather.ca", "<|python_tag|>weather.ca", []),
        (PW[:-3], "", [("weather", ARGS[:-2])]),
    ],
    "qwen3_coder": [
        (f"{T1}\n{XW}\n{T2}", "", [W2]),
        (f"Sure.\n{T1}\n{XW}\n{T2}\n{T1}\n{XN}\n{T2}", "Sure.", [W2, N]),
        (f"{XW} then", " then", [W2]),
        (f"{T1}<function=now>{T2}x", "x", [N]),
        (
            f'{T1}{XP}city>\na\n\n"b"\\\n\n{PE}{FE}',
            "",
            [("w", '{"city": "a\\n\\n\\"b\\"\\\\\\n"}')],
        ),
        (f"{XP}days>3{XQ}x>1{PE}{FE}", "", [("w", '{"days": "3", "x": "1"}')]),
        (f"{XP}city>a < b </para{FE}", "", [("w", '{"city": "a < b </para"}')]),
        (
            f"{XD}{{'a': None, 'b': [1.5]}}{PE}{FE}",
            "",
            [("weather", '{"days": {"a": null, "b": [1.5]}}')],
        ),
        (f"{XD}True{PE}{FE}", "", [("weather", '{"days": true}')]),
        (f"{XD}many{PE}{FE}", "", [("weather", '{"days": "many"}')]),
        (f"{XP}city>Kö", "", [("w", '{"city": "Kö')]),
        (f"{XP}city>a{PE} junk", " junk", [("w", '{"city": "a"}')]),
        (f"{XP}ci", "", [("w", "{")]),
        (f"{XD}3", "", [("weather", '{"days": ')]),
        (f"{T1}\n<function", f"{T1}\n<function", []),
        (f"{T1} {JN} {T2}", f"{T1} {JN} {T2}", []),
        ("a <function=>b", "a <function=>b", []),
        ("a <function=x\n>b", "a <function=x\n>b", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{JW}, {JN}]", "", [W, N]),
        (f"[TOOL_CALLS] [{JW}]\n", "", [W]),
        (f"Hm.\n[TOOL_CALLS]weather{ARGS}[TOOL_CALLS]now{{}}", "Hm.", [W, N]),
        (f"[TOOL_CALLS]weather[ARGS]{ARGS} x", " x", [W]),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{ARGS}", "", [W]),
        (f"[TOOL_CALLS]{JN}", "", [N]),
        ("[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        (f"[TOOL_CALLS][{JN}, oops] x", ", oops] x", [N]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALL] [1]", "[TOOL_CALL] [1]", []),
    ],
    "deepseek_v3": [
        (f"{DS}{DC}function{DSEP}weather\n```json\n{ARGS}\n```{DCE}{DE}", "", [W]),
        (
            f"Ok.\n{DS}{DC}function{DSEP}now\n```json\n{{}}\n```{DCE}\n"
            f"{DC}function{DSEP}weather\n```json\n{ARGS}\n```{DCE}{DE} end",
            "Ok. end",
            [N, W],
        ),
        (f"{DS}{DC}weather{DSEP}{ARGS}{DCE}{DC}now{DSEP}{{}}{DCE}{DE}", "", [W, N]),
        (f'{DC}now{DSEP}{{"a": [{DCE}x', "x", [("now", '{"a": [')]),
        (f"{DS}nothing{DE}", f"{DS}nothing{DE}", []),
        (f"{DS}{DC}now{DCE}{DE}", f"{DS}{DC}now{DCE}{DE}", []),
        (f"{DC}function{DSEP}now\nno json{DCE}", f"{DC}function{DSEP}now\nno json{DCE}", []),
        (f"x{DS}{DC}fun", f"x{DS}{DC}fun", []),
    ],
    "deepseek_v4": [
        (f"{MB}\n{MW}\n{ME}", "", [MW2 := ("weather", '{"city": "Kö\\"}\\n", "days": 3}')]),
        (f"Ok.\n\n{MB}\n{MN}\n{MW}\n{ME} end", "Ok. end", [N, MW2]),
        (f"{MW}\n", "", [MW2]),
        (
            f'{MB}{MI}f">{MP}a" string="false">[1, {{"b": null}}]{MPE}{MIE}{ME}',
            "",
            [("f", '{"a": [1, {"b": null}]}')],
        ),
        (f'{MI}f">{MP}a" string="false">many{MPE}{MIE}', "", [("f", '{"a": "many"}')]),
        (f'{MI}f">{MP}a">x{MP}b">y{MIE}', "", [("f", '{"a": "x", "b": "y"}')]),
        (f'{MI}f">{MP}a" string="true">half', "", [("f", '{"a": "half')]),
        (f'{MI}f">{MP}a" string="false">3', "", [("f", '{"a": ')]),
        (f'{MI}f">{MP}a', "", [("f", "{")]),
        (f'{MI}f"> junk', " junk", [("f", "{}")]),
        (f"{MB}\nnothing{ME}", f"{MB}\nnothing{ME}", []),
        (f"{MI}f>x", f"{MI}f>x", []),
        (f"Hm.\n\n<｜DSML｜toolcalls>\n{MN}\n{ME}", "Hm.", [N]),
        (f"{MN}\n{ME}.", ".", [N]),
        (f"x{MB}{MI}fun", f"x{MB}{MI}fun", []),
    ],
    "gemma": [
        (
            '```tool_code\nweather(city="Köln", days=3)\n```',
            "",
            [W2 := ("weather", '{"city": "Köln", "days": 3}')],
        ),
        ("See:\n```tool_code\nprint(weather('Köln', 3))\nnow()\n```\nbye", "See:\nbye", [W2, N]),
        ("```tool_code\nimport os\n```", "```tool_code\nimport os\n```", []),
        ("```tool_code\nweather(1", "```tool_code\nweather(1", []),
        (PW, "", [W]),
        (f"Yes\n```json\n{PW}\n```", "Yes", [W]),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        (
            f"Hm <|tool_call>call:weather{{city:{Q}Köln, {{x}}{Q},days:3}}<tool_call|>",
            "Hm",
            [("weather", '{"city": "Köln, {x}", "days": 3}')],
        ),
        (
            "<start_function_call>call:f{a:<escape>x<escape>, b:[1,{c:true}],d:{},e:[]}"
            "<end_function_call><start_function_call>call:now{}<end_function_call>",
            "",
            [("f", '{"a": "x", "b": [1, {"c": true}], "d": {}, "e": []}'), N],
        ),
        (
            '<|tool_call>call:f{"a":"b\\n",c:two words}<tool_call|>',
            "",
            [("f", '{"a": "b\\n", "c": "two words"}')],
        ),
        ("<|tool_call>call:f{a:}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>", []),
        ("<|tool_call>call:f{a:1} x<tool_call|>", "<|tool_call>call:f{a:1} x<tool_call|>", []),
        (
            f"<|tool_call>call:f{{a:{Q}x}}<tool_call|>",
            f"<|tool_call>call:f{{a:{Q}x}}<tool_call|>",
            [],
        ),
        ("<|tool_call>call:f{a:1}", "", [("f", '{"a": 1}')]),
    ],
    "pythonic": [
        ('[weather(city="Köln", days=3), now()]', "", [W2, N]),
        (" [now()]\n", "", [N]),
        ("<|python_start|>[now()]<|python_end|> hi", " hi", [N]),
        (
            '[weather(city="a]b\\"", days={"k": [None, true, -1.5]})]',
            "",
            [("weather", '{"city": "a]b\\"", "days": {"k": [null, true, -1.5]}}')],
        ),
        ("[weather('Köln', days=3)]", "", [W2]),
        ("[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
        ("[link](http://x)", "[link](http://x)", []),
        ("[now(), 5] x", "[now(), 5] x", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[now(__import__('os'))]", "[now(__import__('os'))]", []),
        ("[weather(**x)]", "[weather(**x)]", []),
        ("[weather(city=1e999)]", "[weather(city=1e999)]", []),
        ("[now(", "[now(", []),
        ("[]", "[]", []),
        ("text [now()]", "text [now()]", []),
    ],
}
CASES["deepseek_v32"] = [
    (
        text.replace("tool_calls", "function_calls"),
        content.replace("tool_calls", "function_calls"),
        c,
    )
    for text, content, c in CASES["deepseek_v4"]
]
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
