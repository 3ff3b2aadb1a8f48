"""/v1/responses through the OpenAI SDK, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from slipstream.server.request_stream import EngineDead

from ..api_fakes import (
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
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "king"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "string", "enum": [1]}}}},
         "text.format"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"truncation": "some"}, "truncation"),
    ],
)  # fmt: skip
async def test_wrong_values_are_named(change: dict[str, Any], param: str) -> None:
    async with http_client(app_for(ScriptedEngine())) as client:
        response = await client.post("/v1/responses", json={"model": MODEL, "input": "x", **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_output_tokens": 3},
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "truncation": "auto", "user": "u"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 3},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools":
            [{"type": "function", "name": "weather"}]}},
    ],
)  # fmt: skip
async def test_every_shape_is_openais(change: dict[str, Any]) -> None:
    forced = "tool_choice" in change and "allowed" not in str(change)
    text = '[{"name": "weather", "parameters": {}}]' if forced else REPLY
    body = {"model": MODEL, "input": "hi", **change}
    events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with http_client(app_for(ScriptedEngine(reply_with(text)))) as client:
        whole = (await client.post("/v1/responses", json=body)).json()
        stream = (await client.post("/v1/responses", json={**body, "stream": True})).text
    Response.model_validate(whole)
    told = []
    for number, block in enumerate(stream.split("\n\n")[:-1]):
        name, _, data = block.partition("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        events.validate_python(told[-1])
        assert name == f"event: {told[-1]['type']}" and told[-1]["sequence_number"] == number
    last = told[-1]["response"]
    cut = "max_output_tokens" in change
    assert told[-1]["type"] == ("response.incomplete" if cut else "response.completed")
    assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    ids = {"id", "call_id", "created_at", "completed_at"}
    assert _without(last, ids) == _without(whole, ids)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("run", [1, 4])
async def test_logprobs_come_with_the_text_when_asked(run: int) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with sdk_client(app_for(ScriptedEngine(reply_with(run=run)))) as client:
        reply = await client.responses.create(model=MODEL, input="hi", **asked)  # type: ignore[call-overload]
        plain = await client.responses.create(model=MODEL, input="hi", top_logprobs=2)
        stream = await client.responses.create(model=MODEL, input="hi", stream=True, **asked)  # type: ignore[call-overload]
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    found = reply.output[0].content[0].logprobs
    assert bytes(b for entry in found for b in entry.bytes).decode() == reply.output_text == REPLY
    assert all(len(entry.top_logprobs) == 2 for entry in found)
    streamed = [entry.logprob for delta in deltas for entry in delta.logprobs]
    assert streamed == [entry.logprob for entry in found]
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr]


async def test_input_tokens_are_counted_without_generating() -> None:
    engine = ScriptedEngine()
    async with sdk_client(app_for(engine)) as client:
        count = await client.responses.input_tokens.count(model=MODEL, input="hi")
        assert not engine.requests
        reply = await client.responses.create(model=MODEL, input="hi")
    assert reply.usage is not None and count.input_tokens == reply.usage.input_tokens
    assert count.object == "response.input_tokens"


async def test_truncation_drops_the_start_where_it_is_asked_for() -> None:
    engine = ScriptedEngine()
    long = {"model": MODEL, "input": "x" * 5000}
    async with http_client(app_for(engine)) as client:
        refused = await client.post("/v1/responses", json=long)
        taken = await client.post("/v1/responses", json={**long, "truncation": "auto"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    assert taken.status_code == 200 and taken.json()["truncation"] == "auto"
    assert len(engine.requests[0].prompt_token_ids) == 4095


async def test_stored_responses_do_not_exist() -> None:
    async with sdk_client(app_for(ScriptedEngine())) as client:
        with pytest.raises(openai.NotFoundError, match="does not store responses"):
            await client.responses.retrieve("resp_1")


async def test_fault_in_a_stream_is_response_failed() -> None:
    engine = ScriptedEngine(lambda r: [reply_with()(r)[0], EngineDead("the worker was killed")])
    app = app_for(engine)
    async with sdk_client(app) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        last: Any = [event async for event in stream][-1]
    assert last.type == "response.failed" and "killed" in last.response.error.message
    assert not engine.open
    async with http_client(app) as client:  # it counts as an error, not as an abort
        metrics = (await client.get("/metrics")).text
    counts = [line for line in metrics.splitlines() if "request_success_total{" in line]
    assert [line.split()[-1] for line in counts if '"error"' in line] == ["1.0"]
    assert [line.split()[-1] for line in counts if '"abort"' in line] == ["0.0"]
