"""/v1/chat/completions through the OpenAI SDK and httpx, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..api_fakes import (
    MAX_LEN,
    MODEL,
    REPLY,
    TOKENIZER,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    reply_with,
    sdk_client,
)

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def post(engine: ScriptedEngine, **body: Any) -> dict[str, Any]:
    async with http_client(make_app(engine)) as client:
        full = {"model": MODEL, "messages": HI, **body}
        response = await client.post("/v1/chat/completions", json=full)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result


async def chunks(engine: ScriptedEngine, **body: Any) -> list[dict[str, Any]]:
    async with http_client(make_app(engine)) as client:
        full = {"model": MODEL, "messages": HI, "stream": True, **body}
        response = await client.post("/v1/chat/completions", json=full)
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(data) for data in events[:-1]]


def prompt_of(engine: ScriptedEngine) -> str:
    return TOKENIZER.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_sdk_reads_a_whole_reply() -> None:
    engine = ScriptedEngine()
    async with sdk_client(make_app(engine)) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
    choice = reply.choices[0]
    assert reply.object == "chat.completion" and choice.message.role == "assistant"
    assert choice.message.content == REPLY and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert reply.usage is not None
    assert len(choice.logprobs.content) == reply.usage.completion_tokens
    data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert data.decode() == REPLY
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert prompt_of(engine) == "<|user|>hi<|end|><|assistant|>"
    assert engine.requests[0].sampling.max_tokens == MAX_LEN - reply.usage.prompt_tokens


async def test_sdk_reads_a_stream() -> None:
    async with sdk_client(make_app(ScriptedEngine())) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            n=2,
        )
        found = [chunk async for chunk in stream]
    roles = [c.choices[0].delta.role for c in found if c.choices and c.choices[0].delta.role]
    assert roles == ["assistant", "assistant"] and found[0].choices[0].delta.role == "assistant"
    for index in range(2):
        mine = [c.choices[0] for c in found if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == REPLY
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
    assert found[-1].usage is not None and found[-1].usage.completion_tokens == 36
    assert not found[-1].choices and all(c.usage is None for c in found[:-1])


@pytest.mark.parametrize("run", [1, 2, 4, 50])
async def test_stream_equals_whole(run: int) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "stop": ["ld"], "return_token_ids": True}
    whole = (await post(ScriptedEngine(reply_with(run=run)), **body))["choices"][0]
    found = [c["choices"][0] for c in await chunks(ScriptedEngine(reply_with(run=run)), **body)]
    assert "".join(c["delta"].get("content", "") for c in found) == whole["message"]["content"]
    assert whole["message"]["content"] == "Hello wör"
    logprobs = [e for c in found if c["logprobs"] for e in c["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [i for c in found for i in c.get("token_ids", ())] == whole["token_ids"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "system", "content": "s"}, *HI], "<|system|>s<|end|><|user|>hi<|end|>"),
        ([{"role": "developer", "content": "s"}, *HI], "<|system|>s<|end|><|user|>hi<|end|>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            "<|user|>a\nb<|end|>",
        ),
        (
            [
                *HI,
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ]},
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ],
            "<|user|>hi<|end|><|assistant|><|end|><|tool|>42<|end|>",
        ),
    ],
)  # fmt: skip
async def test_every_role_reaches_the_template(messages: list[Any], expected: str) -> None:
    engine = ScriptedEngine()
    await post(engine, messages=messages)
    assert prompt_of(engine) == expected + "<|assistant|>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "-"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "TrueTrue"),
        ({"thinking": {"type": "disabled"}}, "FalseFalse"),
        ({"thinking": {"type": "auto"}}, "-"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            "False",
        ),
    ],
)
async def test_deepseek_s_switch_of_reasoning_reaches_the_template(
    body: dict[str, Any], expected: str
) -> None:
    engine = ScriptedEngine()
    shown = "{{ thinking if thinking is defined else '-' }}{{ enable_thinking }}"
    app = make_app(engine, config_with(trust_request_chat_template=True))
    async with http_client(app) as client:
        full = {"model": MODEL, "messages": HI, "chat_template": shown, **body}
        assert (await client.post("/v1/chat/completions", json=full)).status_code == 200
        wrong = await client.post("/v1/chat/completions", json={**full, "thinking": {"type": "on"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("thinking")
    assert prompt_of(engine) == expected


async def test_final_message_is_continued() -> None:
    engine = ScriptedEngine()
    messages = [*HI, {"role": "assistant", "content": "Well"}]
    await post(engine, messages=messages, continue_final_message=True)
    assert prompt_of(engine) == "<|user|>hi<|end|><|assistant|>Well"
    await post(engine, add_generation_prompt=False)
    assert prompt_of(engine) == "<|user|>hi<|end|>"


async def test_a_clients_template_needs_the_operators_consent() -> None:
    engine = ScriptedEngine()
    body = {"model": MODEL, "messages": HI, "chat_template": "T {{ messages[0].content }} {{ x }}"}
    async with http_client(make_app(engine)) as client:
        refused = await client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    app = make_app(engine, config_with(trust_request_chat_template=True))
    async with http_client(app) as client:
        body["chat_template_kwargs"] = {"x": 3}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert prompt_of(engine) == "T hi 3"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 20),
        ({"max_tokens": 50}, 50),
        ({"max_completion_tokens": 50}, 50),
        ({"min_tokens": 30}, 30),
        ({"messages": [{"role": "user", "content": "x" * 450}]}, 40),  # no more fits
    ],
)
async def test_default_bounds_a_chat_that_names_no_limit(
    body: dict[str, Any], expected: int
) -> None:
    default = 100 if "messages" in body else 20
    engine = ScriptedEngine()
    config = config_with(default_max_tokens=default)
    async with http_client(make_app(engine, config)) as client:
        full = {"model": MODEL, "messages": HI, **body}
        assert (await client.post("/v1/chat/completions", json=full)).status_code == 200
    assert engine.requests[0].sampling.max_tokens == expected


async def test_default_bounds_a_response_that_names_no_limit() -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine, config_with(default_max_tokens=20))) as client:
        for body in ({}, {"max_output_tokens": 50}):
            full = {"model": MODEL, "input": "hi", **body}
            assert (await client.post("/v1/responses", json=full)).status_code == 200
    assert [request.sampling.max_tokens for request in engine.requests] == [20, 50]


async def test_max_completion_tokens_beats_max_tokens() -> None:
    engine = ScriptedEngine()
    reply = await post(engine, max_tokens=9, max_completion_tokens=4)
    assert engine.requests[0].sampling.max_tokens == 4
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 4


async def test_prompt_facts_are_returned_on_demand() -> None:
    reply = await post(ScriptedEngine(), return_token_ids=True, prompt_logprobs=1)
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    found = await chunks(ScriptedEngine(), return_token_ids=True)
    assert found[0]["prompt_token_ids"] == reply["prompt_token_ids"]


async def test_long_chats_are_rendered_all_the_same() -> None:
    engine = ScriptedEngine()
    engine.ready.max_model_len = 40_000
    await post(engine, messages=[{"role": "user", "content": "b" * 20_000}], max_tokens=1)
    assert len(engine.requests[0].prompt_token_ids) > 20_000
