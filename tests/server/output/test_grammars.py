"""Grammars that clients write: what is wrong with them is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.runner.messages import GrammarSpec
from slipstream.server.errors import InvalidRequest
from slipstream.server.openai_types.chat import ChatCompletionRequest
from slipstream.server.output.grammars import grammar_of

from ..api.test_chat import HI
from ..api_fakes import MODEL, ScriptedEngine, config_with, http_client, make_app

EMOJI = r"\ud83d\ude00"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def wanted(**fields: Any) -> GrammarSpec | None:
    body = {"model": MODEL, "messages": HI, **fields}
    return grammar_of(ChatCompletionRequest.model_validate(body))


@pytest.mark.parametrize(
    "text",
    [
        '{"const": NaN}',
        '{"minimum": -Infinity}',
        '{"enum": [Infinity]}',
        '{"const": "\\ud800"}',
        '{"properties": {"\\udc00": {}}}',
        '{"items": ' * 5000 + "{}" + "}" * 5000,
        '{"enum": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"enum": ' + "[" * 100 + "]" * 100 + "}",
        "nothing",
        "[1]",
        "",
        '{"description": "' + "x" * 300_000 + '"}',
    ],
)
def test_json_in_text_is_held_to_what_holds_for_bodies(text: str) -> None:
    for fields in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        with pytest.raises(InvalidRequest) as caught:
            wanted(**fields)
        assert caught.value.param == next(iter(fields))
        assert len(caught.value.message) < 300
        caught.value.message.encode()
    with pytest.raises(InvalidRequest):
        wanted(structured_outputs={"structural_tag": text or "["})


def test_json_in_text_may_say_whatever_json_says() -> None:
    spec = wanted(guided_json=json.dumps({"enum": ["😀", 1]}))
    assert spec == GrammarSpec("json_schema", '{"enum":["😀",1]}', "guided_json")


def test_pairs_of_surrogates_are_one_character_in_every_grammar() -> None:
    assert wanted(guided_regex=EMOJI) == GrammarSpec("regex", "😀", "guided_regex")
    grammar = f'root ::= "{EMOJI}"'
    expected = GrammarSpec("grammar", 'root ::= "😀"', "structured_outputs")
    assert wanted(structured_outputs={"grammar": grammar}) == expected
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": EMOJI}}
    spec = wanted(response_format=tag)
    assert spec is not None and json.loads(spec.value)["format"]["pattern"] == "😀"


@pytest.mark.parametrize("half", [r"\ud83d", r"x\ude00"])
def test_half_a_pair_is_a_400_in_every_grammar(half: str) -> None:
    for fields in (
        {"guided_regex": half},
        {"guided_grammar": f'root ::= "{half}"'},
        {"structured_outputs": {"regex": half}},
        {"guided_json": {"pattern": half}},
        {"response_format": {"type": "json_schema"}
         | {"json_schema": {"schema": {"patternProperties": {half: {}}}}}},
        {"response_format": {"type": "structural_tag"}
         | {"format": {"type": "grammar", "grammar": f'root ::= "{half}"'}}},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="half of a surrogate pair") as caught:
            wanted(**fields)
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("regex", ["(?=a)b", r"\bx", "(?i)a", "a^b", "("])
def test_a_regular_expression_that_would_match_something_else_is_a_400(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="'guided_regex'"):
        wanted(guided_regex=regex)


def test_schemas_in_structural_tags_are_prepared() -> None:
    schema = {"type": "array", "maxItems": 2}
    form = {"type": "json_schema", "json_schema": schema}
    spec = wanted(response_format={"type": "structural_tag", "format": form})
    assert spec is not None
    assert json.loads(spec.value)["format"]["json_schema"] == {**schema, "items": True}
    form["json_schema"] = {"$ref": "#/$defs/no"}
    with pytest.raises(InvalidRequest, match="which does not exist"):
        wanted(response_format={"type": "structural_tag", "format": form})


async def post(path: str, engine: ScriptedEngine | None = None, **fields: Any) -> Any:
    engine = engine or ScriptedEngine()
    engine.ready.max_model_len = 4096
    config = config_with(tool_call_parser="hermes")
    async with http_client(make_app(engine, config)) as client:
        return await client.post(path, json={"model": MODEL, **fields})


async def test_a_schema_beside_a_forced_function_binds_text_of_which_there_is_none() -> None:
    """Instructor's mode RESPONSES_TOOLS sends both."""
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    named = {"type": "function", "name": "weather"}
    tool = {**named, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    form = {"type": "json_schema", "name": "weather", "strict": True, "schema": schema}
    engine = ScriptedEngine()
    reply = await post(
        "/v1/responses", engine, input="hi", tools=[tool], tool_choice=named, text={"format": form}
    )
    assert reply.status_code == 200
    assert reply.json()["text"]["format"]["name"] == "weather"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and grammar.param == "tools" and "city" in grammar.value
    chat = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    choice = {"type": "function", "function": {"name": "weather"}}
    more = {"messages": HI, "tools": [WEATHER], "tool_choice": choice}
    reply = await post("/v1/chat/completions", response_format=chat, **more)
    assert reply.status_code == 200
    chat["json_schema"]["schema"] = {"properties": 3}  # type: ignore[index]
    reply = await post("/v1/chat/completions", response_format=chat, **more)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "response_format"


async def test_a_key_that_speculative_does_not_have_is_a_400() -> None:
    reply = await post("/v1/completions", prompt="hi", speculative={"enable": False})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "speculative"
    for word in ("'enable'", "enabled", "max_tokens", "metrics"):
        assert word in error["message"]


async def test_a_wrong_model_s_404_names_what_is_served() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        for reply in (
            await client.post("/v1/completions", json={"model": "gpt-4o", "prompt": "hi"}),
            await client.get("/v1/models/gpt-4o"),
        ):
            assert reply.status_code == 404
            message = "The model `gpt-4o` does not exist. This server serves `tiny`, `alias`."
            assert reply.json()["error"]["message"] == message
