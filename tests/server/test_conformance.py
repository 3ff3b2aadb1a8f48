"""What clients of OpenAI and vLLM rely on beyond the text: parameters, shapes, headers, chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .api_fakes import EOS, MODEL, TOKENIZER, ScriptedEngine, http_client, make_app, reply_with

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
