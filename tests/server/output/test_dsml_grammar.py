"""Grammars of DeepSeek V3.2's and V4's calls, compiled by the library, and the parser of them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import xgrammar as xgr

from slipstream.server.chat_templates.deepseek import DeepSeekV4Encoder
from slipstream.server.json_schema import SchemaError
from slipstream.server.output.chat_tools import OutputFormat
from slipstream.server.tool_parsers.deepseek import DsmlToolParser, DsmlV32ToolParser
from slipstream.server.tool_parsers.forced import forced_grammar

from ..api.test_chat import HI, prompt_of
from ..api_fakes import (
    MODEL,
    ScriptedEngine,
    byte_tokenizer,
    config_with,
    http_client,
    make_app,
    reply_with,
)
from ..tool_parsers.test_tool_parsers import cut, parse

TEXT: dict[str, Any] = {"type": "string"}
WEATHER = {
    "type": "object",
    "properties": {"city": TEXT, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
V4_FORM, V32_FORM = DsmlToolParser, DsmlV32ToolParser
FORMS = pytest.mark.parametrize("form", [V4_FORM, V32_FORM], ids=["v4", "v32"])


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


TOOLS = [tool("weather", WEATHER), tool("now")]


@cache
def compiler() -> xgr.GrammarCompiler:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgr.TokenizerInfo(vocabulary, stop_token_ids=[256])  # type: ignore[arg-type]
    return xgr.GrammarCompiler(info, max_threads=1)


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgr.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(256)


def written(form: type[DsmlToolParser], *calls: tuple[str, Any]) -> str:
    """The calls as the encoder shows them in a chat."""
    shown = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    message = {"role": "assistant", "content": "", "tool_calls": shown}
    chat = {"messages": [message], "add_generation_prompt": False, "thinking": False}
    text = DeepSeekV4Encoder().render(chat)
    text = text.removeprefix("<｜begin▁of▁sentence｜>").removesuffix("<｜end▁of▁sentence｜>")
    return text.replace("DSML｜tool_calls", f"DSML｜{form.block}")


RAIN = ("weather", {"city": 'Köln "<b>\n', "days": 3})
NOW: tuple[str, Any] = ("now", {})


@FORMS
def test_required_calls(form: type[DsmlToolParser]) -> None:
    grammar = compiler().compile_structural_tag(form.forced_grammar(TOOLS).value)
    single = compiler().compile_structural_tag(form.forced_grammar(TOOLS, parallel=False).value)
    named = compiler().compile_structural_tag(form.forced_grammar(TOOLS, "weather").value)
    for calls in ([RAIN], [NOW], [RAIN, NOW, RAIN]):
        text = written(form, *calls)
        assert accepts(grammar, text)
        assert accepts(single, text) is (len(calls) == 1)
        assert accepts(named, text) is (calls == [RAIN])
        whole = parse(form(TOOLS, lambda: "id", is_forced=True), [text])
        assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == calls
        for pieces in (list(text), *(cut(text, seed) for seed in range(10))):
            assert parse(form(TOOLS, lambda: "id", is_forced=True), pieces) == whole
    for wrong in (
        written(form),
        written(form, ("weather", {"days": 3})),
        written(form, ("weather", {"city": "x", "more": "y"})),
        written(form, ("weather", {"city": "x", "days": "3"})),
        written(form, ("other", {})),
        "Sure." + written(form, NOW),
        written(form, NOW) + "Done.",
    ):
        assert not accepts(grammar, wrong)


@FORMS
def test_calls_of_strict_functions_fit_wherever_they_come(form: type[DsmlToolParser]) -> None:
    strict = [tool("weather", WEATHER, strict=True), tool("now")]
    spec = form.strict_grammar(strict)
    assert spec is not None and (spec.kind, spec.param) == ("structural_tag", "tools")
    grammar = compiler().compile_structural_tag(spec.value)
    for text in ("No call <｜DSML｜x", "I think.</think>Let me see.", ""):
        assert accepts(grammar, text + written(form, RAIN, ("now", {"any": ["thing"]})) + " Done")
        assert accepts(grammar, text)
    assert not accepts(grammar, written(form, ("weather", {"days": 3})))
    assert not accepts(grammar, written(form, ("other", {})))
    assert form.strict_grammar(TOOLS) is None
    with pytest.raises(SchemaError):
        form.strict_grammar([tool("f", {"not": {}}, strict=True)])


NUMBER: dict[str, Any] = {"type": "integer"}
ONE = {"type": "object", "properties": {"p": TEXT}, "required": ["p"]}
SCHEMAS: list[Any] = [
    TEXT, NUMBER, {"type": "boolean"}, {"type": ["string", "null"]}, {"enum": ["a", 1, None]}, {},
    {"const": 1}, {"type": "array", "items": NUMBER}, ONE,
    {"type": "string", "pattern": "^[a-c]b$"},
    {"type": "string", "minLength": 2, "maxLength": 3}, {"type": "number", "minimum": 2},
    {"anyOf": [{"$ref": "#/$defs/n"}, TEXT]}, {"type": "string", "enum": ["1", "2"]},
]  # fmt: skip
VALUES: list[Any] = [
    "", "ab", "abcd", "1", "null", 1, 2.5, True, None, [], [1], {"p": "x"}, {"p": 1}, 'q"\n</b>',
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_parameter_s_schema_means_what_it_means_in_json(schema: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"p": schema},
        "required": ["p"],
        "additionalProperties": False,
        "$defs": {"n": NUMBER},
    }
    tools = [tool("f", parameters, strict=True)]
    as_json = compiler().compile_json_schema(forced_grammar(tools, "f").value)
    grammar = compiler().compile_structural_tag(V4_FORM.forced_grammar(tools, "f").value)
    accepted = 0
    for value in VALUES:
        arguments = {"p": value}
        text = written(V4_FORM, ("f", arguments))
        is_valid = accepts(as_json, json.dumps(arguments))
        assert accepts(grammar, text) is is_valid, value
        accepted += is_valid
        (call,) = parse(V4_FORM(tools, is_forced=True), cut(text, len(text))).tool_calls
        assert json.loads(call.arguments) == arguments
    assert accepted


def test_further_parameters_of_a_strict_function() -> None:
    def grammar(parameters: Any) -> Any:
        tools = [tool("f", parameters, strict=True)]
        return compiler().compile_structural_tag(V4_FORM.forced_grammar(tools, "f").value)

    def takes(parameters: Any, **arguments: Any) -> bool:
        return accepts(grammar(parameters), written(V4_FORM, ("f", arguments)))

    listed = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}
    assert takes(listed, a="x") and takes(listed) and not takes(listed, a=1)
    both = {"anyOf": [listed, {"type": "object", "properties": {"b": NUMBER}}]}
    assert takes(both, b=1) and takes(both, a="x") and not takes(both, b="1")
    assert takes({"type": "object", "additionalProperties": NUMBER}, x=1, y=2)
    behind = {"$ref": "#/$defs/o", "$defs": {"o": listed}}
    assert takes(behind, a="x") and not takes(behind, a=1)
    for parameters, sentence in (
        ({"anyOf": [{"$ref": "#/$defs/o"}, ONE], "$defs": {"o": listed}}, "behind a '\\$ref'"),
        ({**listed, "required": ["a"], "minProperties": 2}, "not listed"),
        ({"type": "object", "properties": {'q"': TEXT}}, "quotation mark"),
        ({"anyOf": [listed, True]}, "may have any form"),
        ({"$ref": "#/$defs/o", "$defs": {"o": True}}, "may have any form"),
    ):
        with pytest.raises(SchemaError, match=sentence):
            grammar(parameters)


@FORMS
def test_a_strict_function_is_called_in_no_other_spelling(form: type[DsmlToolParser]) -> None:
    """The parser reads all of these as calls, so that none may avoid the function's schema."""
    spec = form.strict_grammar([tool("weather", WEATHER, strict=True), tool("now")])
    assert spec is not None
    grammar = compiler().compile_structural_tag(spec.value)
    wrong = written(form, ("weather", {"days": 3}))
    start, end = f"<｜DSML｜{form.block}>", f"</｜DSML｜{form.block}>"
    for block in ("tool_calls", "function_calls", "toolcalls"):
        assert not accepts(grammar, wrong.replace(start, f"<｜DSML｜{block}>"))
    assert not accepts(grammar, wrong.replace(f"{start}\n", "").replace(end, ""))
    inside = written(form, NOW).replace('"now">\n', '"now">\n-<｜DSML｜invoke name="weather">\n')
    (_, call) = parse(form(TOOLS), [inside]).tool_calls
    assert call.name == "weather" and not accepts(grammar, inside)
    assert accepts(grammar, "A <｜DSML｜invoke element." + written(form, RAIN, NOW))


def test_parameters_that_are_not_an_object_are_refused_or_narrowed() -> None:
    def compiled(parameters: Any, strict: bool) -> Any:
        tools = [tool("f", parameters, strict=strict)]
        return compiler().compile_structural_tag(V4_FORM.forced_grammar(tools, "f").value)

    value = written(V4_FORM, ("f", {})).replace('"f">\n\n', '"f">\nnull')
    for strict in (True, False):
        for parameters in (
            TEXT,
            {"type": "array", "items": NUMBER},
            {"enum": [{}, 1]},
            {"anyOf": [TEXT, {"type": "null"}]},
            {"$ref": "#/$defs/n", "$defs": {"n": NUMBER}},
        ):
            with pytest.raises(SchemaError, match="only parameters that are an object"):
                compiled(parameters, strict)
        for parameters in (
            {**ONE, "type": ["object", "null"]},
            {"anyOf": [{"$ref": "#/$defs/n"}, ONE], "$defs": {"n": TEXT}},
        ):
            grammar = compiled(parameters, strict)
            assert accepts(grammar, written(V4_FORM, ("f", {"p": "x"}))), parameters
            assert not accepts(grammar, value), parameters


END = "</｜DSML｜parameter>"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a", f"b{END}"]},
        {"const": f"{END}b"},
        {"type": "string", "pattern": f"^a{END}$".replace("/", r"\/")},
        {"type": "array", "items": {"enum": [f"x{END}"]}},
        {"type": "object", "properties": {END: TEXT}, "additionalProperties": False},
        {"anyOf": [TEXT, {"const": [{"a": END}]}]},
    ],
)
def test_a_demanded_value_that_holds_the_end_of_a_parameter_is_refused(schema: Any) -> None:
    """Nothing escapes it, so that the call could not be read back."""
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "additionalProperties": False,
    }
    sentence = "DSML cannot write a value that holds"
    with pytest.raises(SchemaError, match=sentence):
        V4_FORM.strict_grammar([tool("f", parameters, strict=True)])
    with pytest.raises(SchemaError, match=sentence):
        V4_FORM.forced_grammar([tool("f", parameters)])
    described = {**parameters, "properties": {"a": {**TEXT, "description": END}}}
    assert V4_FORM.strict_grammar([tool("f", described, strict=True)]) is not None


@FORMS
def test_a_constrained_call_that_is_cut_stays_open(form: type[DsmlToolParser]) -> None:
    """Arguments that end where a stop string or the limit of tokens cuts them are not whole."""
    text = written(form, ("weather", {"days": 3, "city": "x"})).rstrip()
    first, last = (
        text.index("invoke name=") + len('invoke name="weather">'),
        text.rindex("</｜DSML｜i"),
    )
    for length in range(first, last):
        found = parse(form(TOOLS, is_forced=True), [text[:length]])
        (call,) = found.tool_calls
        assert not found.content
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
    assert json.loads(parse(form(TOOLS, is_forced=True), [text]).tool_calls[0].arguments)


def test_a_value_of_a_constrained_call_ends_at_its_own_end() -> None:
    """A grammar allows the ends of other elements inside a text."""
    text = "a</｜DSML｜invoke> and <｜DSML｜parameter name="
    call = written(V4_FORM, ("weather", {"city": text}))
    strict = [tool("weather", WEATHER, strict=True)]
    for parser in (V4_FORM(TOOLS, is_forced=True), V4_FORM(strict)):
        (found,) = parse(parser, list(call)).tool_calls
        assert json.loads(found.arguments) == {"city": text}


def test_special_tokens_that_grammars_spell_have_bytes() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["｜DSML｜", "</think>", "<｜User｜>"])
    tokenizer = type(tokenizer)(tokenizer.backend)
    ids = OutputFormat(V4_FORM).grammar_ids(tokenizer)
    spelled = tokenizer.vocabulary(ids)
    assert [spelled[tokenizer.token_to_id(t) or 0] for t in ("｜DSML｜", "</think>")] == [
        "｜DSML｜".encode(), b"</think>",
    ]  # fmt: skip
    assert spelled[tokenizer.token_to_id("<｜User｜>") or 0] == b""
    silent = tokenizer.vocabulary()
    assert silent[tokenizer.token_to_id("｜DSML｜") or 0] == b""
    assert OutputFormat(None).grammar_ids(tokenizer) == frozenset()


async def ask(engine: ScriptedEngine, stream: bool = False, **body: Any) -> Any:
    engine.ready.max_model_len = 8192
    config = config_with(tool_call_parser="deepseek_v4", reasoning_parser="deepseek_v4")
    app = make_app(engine, config)
    object.__setattr__(
        app.state.services, "template", type(app.state.services.template)(None, {}, ENCODER)
    )
    async with http_client(app) as client:
        full = {"model": MODEL, "messages": HI, "stream": stream, **body}
        response = await client.post("/v1/chat/completions", json=full)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"][0]
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    return [chunk["choices"][0] for chunk in chunks]


ENCODER = DeepSeekV4Encoder()


@pytest.mark.parametrize("run", [1, 5, 400])
async def test_reasoning_and_a_call_over_http(run: int) -> None:
    text = "I need the weather.</think>Let me look." + written(V4_FORM, RAIN)
    engine = ScriptedEngine(reply_with(text, run))
    choice = await ask(engine, tools=TOOLS)
    message = choice["message"]
    assert message["reasoning_content"] == "I need the weather."
    assert message["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == RAIN
    prompt = prompt_of(engine)
    assert '### Available Tool Schemas\n\n{"name": "weather", "parameters": ' in prompt
    assert prompt.endswith("<｜Assistant｜><think>")
    chunks = await ask(engine, True, tools=TOOLS)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "I need the weather."
    calls = [part["function"] for d in deltas for part in d.get("tool_calls") or ()]
    assert json.loads("".join(part["arguments"] for part in calls)) == RAIN[1]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_forced_call_over_http(choice: Any) -> None:
    engine = ScriptedEngine(reply_with(written(V4_FORM, RAIN)))
    found = await ask(engine, tools=TOOLS, tool_choice=choice)
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == RAIN[1] and not found["message"]["content"]
    spec = engine.requests[0].sampling.grammar
    assert spec is not None and spec.kind == "structural_tag" and "deepseek_xml" in spec.value
    assert prompt_of(engine).endswith("<think></think>"), "the call leaves no room for reasoning"


async def test_an_answer_with_a_schema_ends_the_reasoning_first() -> None:
    engine = ScriptedEngine(reply_with('{"a": 1}'))
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    found = await ask(engine, response_format=wanted)
    assert found["message"]["content"] == '{"a": 1}'
    prompt = prompt_of(engine)
    assert "## Response Format:" in prompt and prompt.endswith("<think></think>")
    strict = [tool("weather", WEATHER, strict=True)]
    engine = ScriptedEngine(reply_with("Hm.</think>Yes."))
    found = await ask(engine, tools=strict)
    assert found["message"]["reasoning_content"] == "Hm.", "a free call may be reasoned about"
    assert prompt_of(engine).endswith("<think>") and engine.requests[0].sampling.grammar is not None
