"""Every way a request can go wrong: status, OpenAI's error object, and the parameter it names."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.request_stream import EngineDead, ShutDown

from ..api_fakes import (
    MAX_LEN,
    MODEL,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    reply_with,
    sdk_client,
)

SHARED_ENGINE = ScriptedEngine()
SHARED_APP = make_app(SHARED_ENGINE)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "1"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "s"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [999999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": MAX_LEN}, "truncate_prompt_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
     "response_format.json_schema.schema"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"speculative": {"max_tokens": -1}}, "speculative.max_tokens"),
    ({"speculative": True}, "speculative"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"priority": 1.5}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"model": None}, "model"),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "assistant"}]}, "messages[0]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [(TEXT, *case) for case in COMMON + COMPLETIONS] + [(CHAT, *case) for case in COMMON + CHATS],
)
async def test_wrong_value_is_a_400_that_names_it(
    path: str, change: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, **({"prompt": "x"} if path == TEXT else {"messages": HI}), **change}
    async with http_client(SHARED_APP) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not SHARED_ENGINE.requests


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "metadata": ' + b'{"a":' * 90 + b"1" + b"}" * 90 + b"}",
        b"[" * 100_000,
    ],
)
async def test_malformed_body_is_a_400(data: bytes) -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        error_of(await client.post(TEXT, content=data), 400)


async def test_a_byte_that_is_no_utf8_is_named_where_it_stands() -> None:
    body = b'{"model": "tiny", "prompt": "long enough \xff"}'
    async with http_client(make_app(ScriptedEngine())) as client:
        message = error_of(await client.post(TEXT, content=body), 400)["message"]
    assert f"byte 0xff in position {body.index(0xFF)}" in message


async def test_parameters_that_are_wrong_together_are_told_without_a_name() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        error = error_of(await client.post("/tokenize", json={}), 400)
    assert error["param"] is None
    assert error["message"] == (
        "Invalid request: exactly one of 'prompt' and 'messages' must be given."
    )


async def test_other_media_types_are_refused() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        headers = {"content-type": "text/plain"}
        body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        error_of(await client.post(TEXT, content=body, headers=headers), 415)


async def test_unknown_urls_methods_and_models() -> None:
    async with http_client(make_app(ScriptedEngine())) as client:
        assert error_of(await client.get("/nope"), 404)["code"] == "unknown_url"
        wrong = await client.get(TEXT)
        assert error_of(wrong, 405)["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"
        missing = await client.post(TEXT, json={"model": "gpt-9", "prompt": "x"})
        error = error_of(missing, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error_of(await client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
        absent = await client.post("/v1/embeddings", json={"input": "x"})
        assert "embeddings" in error_of(absent, 404)["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_what_does_not_fit_the_context_is_refused_before_queueing(path: str) -> None:
    engine = ScriptedEngine()
    text = "b" * (MAX_LEN - 3)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    body |= {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    async with http_client(make_app(engine)) as client:
        error = error_of(await client.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded" and str(MAX_LEN) in error["message"]
    assert not engine.requests


async def test_sdk_raises_its_own_classes() -> None:
    engine = ScriptedEngine()
    async with sdk_client(make_app(engine)) as client:
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        assert caught.value.param == "temperature"
        engine.health.change("restarting", "the worker was killed", retry_in=4)
        with pytest.raises(openai.InternalServerError) as gone:
            await client.completions.create(model=MODEL, prompt="x")
        assert gone.value.status_code == 503 and gone.value.response.headers["retry-after"]


async def test_full_queue_is_a_429_with_retry_after() -> None:
    engine = ScriptedEngine(lambda request: [float("inf")])
    config = config_with(max_queue_size=1)
    capacity = engine.ready.max_num_seqs + 1
    engine.open = {f"other-{n}" for n in range(capacity)}
    async with http_client(make_app(engine, config)) as client:
        response = await client.post(TEXT, json={"model": MODEL, "prompt": "x"})
        error = error_of(response, 429)
        assert error["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        too_many = {"model": MODEL, "prompt": ["x"] * (capacity + 1)}
        error_of(await client.post(TEXT, json=too_many), 400)
    assert not engine.requests


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (EngineDead("the worker was killed", 2), 503, "engine_dead"),
        (ShutDown("the server is shutting down", 2), 503, "server_shutting_down"),
        (RuntimeError("secret detail"), 500, "internal_error"),
        (
            RequestOutput("", [], finish_reason="error", error="NaN in the logits."),
            500,
            "generation_failed",
        ),
        (
            RequestOutput(
                "", [], finish_reason="error", error="The regex is wrong.", invalid_request=True
            ),
            400,
            None,
        ),
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("n", [1, 3])
async def test_fault_ends_its_request_alone(
    fault: Any, status: int, code: str | None, path: str, n: int
) -> None:
    def script(request: Any) -> list[Any]:
        first = reply_with()(request)[0]
        return [first, fault if request.request_id.endswith("-0") else float("inf")]

    engine = ScriptedEngine(script)
    body: dict[str, Any] = {"model": MODEL, "n": n, "max_tokens": 50}
    body |= {"prompt": "x"} if path == TEXT else {"messages": HI}
    async with http_client(make_app(engine)) as client:
        error = error_of(await client.post(path, json=body), status)
        assert "secret" not in error["message"] and error["code"] == code
        if isinstance(fault, EngineDead):
            assert error["message"] == f"The request could not be finished: {fault}."
        assert not engine.open  # the siblings were aborted
        streamed = await client.post(path, json={**body, "stream": True})
        events = [e for e in streamed.text.split("\n\n") if e]
        assert json.loads(events[-1].removeprefix("data: "))["error"] == error
        assert streamed.status_code == 200 and len(events) > 1
        assert not engine.open
        engine.script = reply_with()
        assert (await client.post(path, json=body)).status_code == 200


async def test_stream_error_raises_in_the_sdk() -> None:
    engine = ScriptedEngine(lambda r: [reply_with()(r)[0], EngineDead("the worker was killed")])
    async with sdk_client(make_app(engine)) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="killed"):
            async for _ in stream:
                pass


async def test_slow_body_is_a_408() -> None:
    async def slowly() -> Any:
        yield b'{"model"'
        await asyncio.sleep(5)

    async with http_client(make_app(ScriptedEngine(), config_with(client_timeout=0.05))) as client:
        error_of(await client.post(TEXT, content=slowly()), 408)
