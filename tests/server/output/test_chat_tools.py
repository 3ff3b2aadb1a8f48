"""Tools and reasoning through the chat endpoint: forced and free calls, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.output.chat_tools import OutputFormat
from slipstream.server.output.reasoning import Qwen3Parser
from slipstream.server.tool_parsers.hermes import HermesToolParser

from ..api.test_chat import HI, prompt_of
from ..api_fakes import MODEL, ScriptedEngine, config_with, http_client, make_app, reply_with

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


async def ask(engine: ScriptedEngine, stream: bool, **body: Any) -> dict[str, Any]:
    """One choice's message and finish_reason, put together from chunks if streamed."""
    engine.ready.max_model_len = 4096
    config = config_with(tool_call_parser="hermes", reasoning_parser="qwen3")
    async with http_client(make_app(engine, config)) as client:
        full = {"model": MODEL, "messages": HI, "stream": stream, **body}
        response = await client.post("/v1/chat/completions", json=full)
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        found = {k: choice["message"].get(k) or "" for k in ("content", "reasoning_content")}
        return {**found, "calls": calls, "reason": choice["finish_reason"], **response.json()}
    result: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        for key in ("content", "reasoning_content"):
            result[key] += choice["delta"].get(key, "")
        for part in choice["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(result["calls"]) and part["type"] == "function"
                call = {"id": part["id"], "type": "function", "function": part["function"]}
                result["calls"].append(call)
            else:
                function = result["calls"][part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
        result["reason"] = choice["finish_reason"]
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("run", [1, 4, 200])
async def test_free_calls_become_tool_calls(stream: bool, run: int) -> None:
    engine = ScriptedEngine(reply_with("<think>Where?</think>Let me see. " + CALL, run))
    found = await ask(engine, stream, tools=[WEATHER])
    (call,) = found["calls"]
    assert call["function"]["name"] == "weather" and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert (found["content"], found["reasoning_content"]) == ("Let me see.", "Where?")
    assert found["reason"] == "tool_calls"
    assert "weather" in prompt_of(engine)


async def test_reasoning_tokens_are_counted_and_can_be_hidden() -> None:
    engine = ScriptedEngine(reply_with("<think>Where?</think>There.", 1))
    found = await ask(engine, False)
    details = found["usage"]["completion_tokens_details"]
    assert 6 <= details["reasoning_tokens"] <= len("<think>Where?</think>")
    hidden = await ask(engine, False, include_reasoning=False)
    assert hidden["reasoning_content"] == "" and hidden["content"] == "There."


@pytest.mark.parametrize("stream", [False, True])
async def test_required_call_is_forced_by_a_grammar(stream: bool) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Bonn"}}]'
    engine = ScriptedEngine(reply_with(text))
    found = await ask(engine, stream, tools=[WEATHER], tool_choice="required")
    assert json.loads(found["calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
    assert found["reason"] == "tool_calls" and found["content"] == ""
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and '"weather"' in grammar.value


@pytest.mark.parametrize("stream", [False, True])
async def test_named_call_gives_that_functions_arguments(stream: bool) -> None:
    engine = ScriptedEngine(reply_with('{"city": "Bonn"}'))
    choice = {"type": "function", "function": {"name": "weather"}}
    found = await ask(engine, stream, tools=[WEATHER], tool_choice=choice)
    assert found["calls"][0]["function"]["name"] == "weather"
    assert json.loads(found["calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
    assert found["reason"] == "stop"


async def test_one_call_where_parallel_ones_are_off() -> None:
    engine = ScriptedEngine(reply_with(CALL + CALL))
    assert len((await ask(engine, False, tools=[WEATHER]))["calls"]) == 2
    single = await ask(engine, False, tools=[WEATHER], parallel_tool_calls=False)
    assert len(single["calls"]) == 1


async def test_without_tools_or_with_none_the_text_is_content() -> None:
    engine = ScriptedEngine(reply_with(CALL))
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        found = await ask(engine, False, **body)
        assert found["content"] == CALL and not found["calls"] and found["reason"] == "stop"
        assert "weather" not in prompt_of(engine)


async def test_a_grammar_leaves_no_room_for_reasoning() -> None:
    engine = ScriptedEngine(reply_with('{"a": 1}'))
    found = await ask(engine, False, response_format={"type": "json_object"})
    assert found["content"] == '{"a": 1}' and found["reasoning_content"] == ""


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {
            "tools": [WEATHER],
            "tool_choice": "required",
            "guided_json": {"type": "object"},
        },
        {"tools": [WEATHER], "tool_choice": "maybe"},
    ],
)
async def test_choices_that_cannot_be_kept_are_refused(body: dict[str, Any]) -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        full = {"model": MODEL, "messages": HI, **body}
        response = await client.post("/v1/chat/completions", json=full)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


async def test_wrong_grammar_is_a_400_even_in_a_stream() -> None:
    def refused(request: Any) -> list[Any]:
        error = RequestOutput(request.request_id, [], finish_reason="error", error="No such regex.")
        error.invalid_request = True
        return [error]

    engine = ScriptedEngine(refused)
    async with http_client(make_app(engine)) as client:
        for path, text in (
            ("chat/completions", {"messages": HI}),
            ("completions", {"prompt": "x"}),
        ):
            body = {"model": MODEL, "stream": True, "guided_regex": "(", **text}
            response = await client.post(f"/v1/{path}", json=body)
            assert response.status_code == 400, response.text
    assert not engine.open


async def test_stream_under_a_grammar_loses_nothing() -> None:
    engine = ScriptedEngine(reply_with('{"a": 1}', run=2))
    found = await ask(engine, True, response_format={"type": "json_object"})
    assert found["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("change", "grammar"),
    [
        ({}, True),
        ({"tool_choice": "none"}, False),
        ({"tools": [WEATHER]}, False),
        ({"response_format": {"type": "json_object"}}, True),  # its own
    ],
)
async def test_strict_functions_are_enforced_where_calls_are_free(
    change: dict[str, Any], grammar: bool
) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    engine = ScriptedEngine(reply_with("Sure. " + CALL))
    found = await ask(engine, False, **{"tools": [strict], **change})
    spec = engine.requests[0].sampling.grammar
    assert (spec is not None) is grammar
    if not change:
        assert spec is not None and (spec.kind, spec.param) == ("structural_tag", "tools")
        assert found["content"] == "Sure." and len(found["calls"]) == 1


async def test_a_strict_function_that_cannot_be_enforced_is_a_400() -> None:
    function = {"name": "f", "parameters": {"not": {}}, "strict": True}
    config = config_with(tool_call_parser="hermes")
    async with http_client(make_app(ScriptedEngine(), config)) as client:
        body = {
            "model": MODEL,
            "messages": HI,
            "tools": [{"type": "function", "function": function}],
        }
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_formats_are_read_off_the_template_or_set() -> None:
    app = make_app(ScriptedEngine())
    template = app.state.services.template
    assert OutputFormat.of(config_with().server, template) == OutputFormat(HermesToolParser, None)
    both = config_with(tool_call_parser="none", reasoning_parser="qwen3").server
    assert OutputFormat.of(both, template) == OutputFormat(None, Qwen3Parser)
    with pytest.raises(ValueError, match="nonsense"):
        OutputFormat.of(config_with(tool_call_parser="nonsense").server, template)
