"""/v1/responses through the OpenAI SDK, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from slipstream.server.request_stream import EngineDead

from .api_fakes import (
    MODEL,
    REPLY,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    reply_with,
    sdk_client,
)
from .test_chat import prompt_of

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


def app_for(engine: ScriptedEngine) -> Any:
    engine.ready.max_model_len = 4096
    return make_app(engine, config_with(tool_call_parser="hermes", reasoning_parser="qwen3"))


async def test_sdk_reads_a_whole_response() -> None:
    engine = ScriptedEngine()
    async with sdk_client(app_for(engine)) as client:
        reply = await client.responses.create(model=MODEL, input="hi", instructions="be kind")
    assert reply.output_text == REPLY and reply.status == "completed"
    assert reply.usage is not None and reply.usage.output_tokens == 18
    assert reply.usage.total_tokens == reply.usage.input_tokens + 18
    assert prompt_of(engine) == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("run", [1, 5, 200])
async def test_stream_tells_every_step_and_equals_the_whole(run: int) -> None:
    engine = ScriptedEngine(reply_with("<think>Hm.</think>Let me see. " + CALL, run))
    async with sdk_client(app_for(engine)) as client:
        stream = await client.responses.create(model=MODEL, input="hi", tools=[TOOL], stream=True)
        events = [event async for event in stream]
        whole = await client.responses.create(model=MODEL, input="hi", tools=[TOOL])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    last: Any = events[-1]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    for streamed, item in zip(last.response.output, whole.output, strict=True):
        ids = {"id", "call_id"}
        assert streamed.model_dump(exclude=ids) == item.model_dump(exclude=ids)
    assert whole.output_text == "Let me see."
    call: Any = whole.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})
    for name, expected in (
        ("response.output_text.delta", "Let me see."),
        ("response.reasoning_text.delta", "Hm."),
        ("response.function_call_arguments.delta", call.arguments),
    ):
        assert "".join(e.delta for e in events if e.type == name) == expected  # type: ignore[union-attr]


async def test_a_conversation_with_calls_is_rendered() -> None:
    engine = ScriptedEngine()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "Sunny.", "annotations": []}]},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    async with http_client(app_for(engine)) as client:
        body = {"model": MODEL, "input": items, "max_output_tokens": 3}
        reply = (await client.post("/v1/responses", json=body)).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert prompt_of(engine) == (
        "<|user|>hi<|end|><|assistant|><|end|><|tool|>sunny<|end|>"
        "<|assistant|>Sunny.<|end|><|user|>thanks<|end|><|assistant|>"
    )


async def test_json_schema_and_forced_call_reach_the_grammar() -> None:
    engine = ScriptedEngine(reply_with('{"a": 1}'))
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    choice = {"type": "function", "name": "weather"}
    async with http_client(app_for(engine)) as client:
        for extra in ({"text": {"format": form}}, {"tools": [TOOL], "tool_choice": choice}):
            body = {"model": MODEL, "input": "hi", **extra}
            response = await client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
    assert all(r.sampling.grammar is not None for r in engine.requests)
    assert response.json()["output"][0]["name"] == "weather"
    assert response.json()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
async def test_wrong_values_are_named(change: dict[str, Any], param: str) -> None:
    async with http_client(app_for(ScriptedEngine())) as client:
        response = await client.post("/v1/responses", json={"model": MODEL, "input": "x", **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_stored_responses_do_not_exist() -> None:
    async with sdk_client(app_for(ScriptedEngine())) as client:
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            await client.responses.retrieve("resp_1")


async def test_fault_in_a_stream_is_response_failed() -> None:
    engine = ScriptedEngine(lambda r: [reply_with()(r)[0], EngineDead("the worker was killed")])
    async with sdk_client(app_for(engine)) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        last: Any = [event async for event in stream][-1]
    assert last.type == "response.failed" and "killed" in last.response.error.message
    assert not engine.open
