"""What clients of OpenAI and vLLM rely on beyond the text: parameters, shapes, headers, chunks."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from ..api_fakes import (
    EOS,
    MODEL,
    REPLY,
    TOKENIZER,
    AtOnce,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    reply_with,
    sdk_client,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"model": MODEL, "prompt": "hello"},
    CHAT: {"model": MODEL, "messages": HI},
}
assert EOS is not None


async def chunks(engine: ScriptedEngine, path: str, **body: Any) -> list[dict[str, Any]]:
    async with http_client(make_app(engine)) as client:
        response = await client.post(path, json={**BODIES[path], "stream": True, **body})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_p": 0}, "top_p"),  # as in vLLM; greedy is temperature 0
        ({"use_beam_search": True}, "use_beam_search"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"service_tier": 1}, "service_tier"),
        ({"store": "yes"}, "store"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),  # as in vLLM
    ],
)
async def test_wrong_values_are_named(path: str, change: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        response = await client.post(path, json={**BODIES[path], **change})
    assert response.status_code == 400 and not engine.requests
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", BODIES)
async def test_parameters_without_effect_are_known(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = {
        "store": True, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y",
        "metadata": {"a": "b"}, "user": "u", "spaces_between_special_tokens": False,
        "use_beam_search": False,
    }  # fmt: skip
    async with http_client(make_app(ScriptedEngine())) as client:
        response = await client.post(path, json={**BODIES[path], **known})
    assert response.status_code == 200 and not caplog.records


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("run", [1, 3])
async def test_a_stretch_without_text_shows_that_the_stream_lives(path: str, run: int) -> None:
    ids = [*TOKENIZER.encode("a", False), *[EOS] * 40, *TOKENIZER.encode("b", False)]
    engine = ScriptedEngine(reply_with(ids=ids, run=run, eos=False))
    found = await chunks(engine, path, max_tokens=len(ids), ignore_eos=True)
    choices = [chunk["choices"][0] for chunk in found]
    if path == TEXT:
        texts = [choice["text"] for choice in choices]
    else:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        texts = [choice["delta"].get("content", "") for choice in choices[1:]]
    assert "".join(texts) == "ab"
    assert 3 <= texts.count("") <= 6  # every eight tokens or so
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


SAYING = 'Sie sagt: "hé 🎉"\n\t\\ \x01 </s>'


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"skip_special_tokens": False},
        {"stop": ["no such text"]},
    ],
)
async def test_what_is_written_past_the_layers_is_what_they_would_write(
    path: str, run: int, options: dict[str, Any]
) -> None:
    ids = [*TOKENIZER.encode(SAYING, False), *[EOS] * 20, *TOKENIZER.encode(SAYING, False)]
    body = {**BODIES[path], **options, "stream": True, "max_tokens": len(ids), "ignore_eos": True}
    found = []
    for transport in (AtOnce, lambda app: app):
        app = make_app(ScriptedEngine(reply_with(ids=ids, run=run, eos=False)))
        wire = httpx.ASGITransport(transport(app))
        async with httpx.AsyncClient(transport=wire, base_url="http://test") as client:
            response = await client.post(path, json=body)
        found.append(
            re.sub(rb'"id":"[^"]*","(object":"[^"]*",")?created":\d+', b"", response.content)
        )
    assert found[0] == found[1] and found[0].count(b"data: ") > 10


async def test_a_message_without_anything_has_empty_content_in_a_stream_too() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    engine = ScriptedEngine(reply_with(ids=[EOS], eos=False))
    found = await chunks(engine, CHAT, tools=[tool])
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas == [{"role": "assistant"}, {"content": ""}]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_response_has_its_id_and_time(stream: bool) -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        body = {**BODIES[CHAT], "stream": stream}
        found = [
            await client.post(CHAT, json=body, headers={"x-request-id": "mine"}),
            await client.post(CHAT, json={}),
            await client.get("/v1/models"),
            await client.get("/nowhere"),
        ]
    assert [response.status_code for response in found] == [200, 400, 200, 404]
    assert found[0].headers["x-request-id"] == "mine"
    assert all(response.headers["x-request-id"] for response in found)
    assert all(0 <= int(response.headers["openai-processing-ms"]) < 60_000 for response in found)


WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.mark.parametrize("run", [1, 2, 5, 500])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        (REPLY, {}),
        (REPLY, {"tools": [WEATHER]}),
        (REPLY, {"logprobs": True, "top_logprobs": 2, "n": 3}),
        (CALL, {"tools": [WEATHER]}),
        (f"<think>Hm.</think>\n\nLet me see.\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
        (f"{CALL}\n{CALL}", {"tools": [WEATHER], "parallel_tool_calls": False}),
        ("<think>Only thoughts", {}),
        (
            '[{"name": "weather", "parameters": {}}]',
            {"tools": [WEATHER], "tool_choice": "required"},
        ),
        ("{}", {"tools": [WEATHER], "tool_choice": WEATHER}),
    ],
)
async def test_a_stream_put_together_by_the_sdk_is_the_whole_reply(
    run: int, text: str, options: dict[str, Any]
) -> None:
    engine = ScriptedEngine(reply_with(text, run))
    engine.ready.max_model_len = 4096
    app = make_app(engine, config_with(tool_call_parser="hermes", reasoning_parser="qwen3"))
    async with sdk_client(app) as client:
        body: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 500, **options}
        whole = await client.chat.completions.create(**body)
        usage: Any = {"include_usage": True}
        stream = await client.chat.completions.create(**body, stream=True, stream_options=usage)
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        async for chunk in stream:
            state.handle_chunk(chunk)
        joined = state.get_final_completion()
    assert joined.usage == whole.usage
    for streamed, choice in zip(joined.choices, whole.choices, strict=True):
        found, expected = streamed.model_dump(), choice.model_dump()
        for side in (found, expected):
            for call in side["message"]["tool_calls"] or ():
                for name in ("id", "index"):  # ids are fresh, only streams have an index
                    call.pop(name, None)
                call["function"].pop("parsed_arguments", None)
            side["message"].pop("parsed", None)
            side.pop("stop_reason", None)  # vLLM's, which the SDK does not put together
        assert found == expected
