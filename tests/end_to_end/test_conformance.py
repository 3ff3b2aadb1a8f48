"""The real server follows OpenAI's API; replies are validated with the SDK's own models."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from .conftest import RunningServer

MODEL = "smollm2-135m"
HI: list[Any] = [{"role": "user", "content": "Say hi"}]
COUNT = "1, 2, 3,"


class Digit(BaseModel):
    digit: Annotated[int, Field(ge=0, le=9)]


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    full = {"model": MODEL, "temperature": 0, **body}
    return httpx.post(f"{server.url}{path}", json=full, timeout=60)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


def test_replies_validate_as_sdk_models(server: RunningServer) -> None:
    chat = post(server, "/v1/chat/completions", messages=HI, max_tokens=3, logprobs=True, n=2)
    ChatCompletion.model_validate(chat.json())
    text = post(server, "/v1/completions", prompt=COUNT, max_tokens=3, logprobs=2)
    Completion.model_validate(text.json())
    for model in httpx.get(f"{server.url}/v1/models").json()["data"]:
        Model.model_validate(model)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    found = chunks(post(server, "/v1/chat/completions", messages=HI, max_tokens=3, **usage))
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["usage"] is None for chunk in found] == [True] * (len(found) - 1) + [False]
    assert found[-1]["choices"] == [] and len({(c["id"], c["created"]) for c in found}) == 1
    assert [c["choices"][0]["finish_reason"] for c in found[-3:-1]] == [None, "length"]
    whole = chat.json()
    assert whole["id"].startswith("chatcmpl-") and text.json()["id"].startswith("cmpl-")
    message = whole["choices"][0]["message"]
    assert message["refusal"] is None and "tool_calls" not in message
    assert whole["choices"][1]["message"] == message  # greedy
    for entry in whole["choices"][0]["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_responses_work_with_the_sdk_s_helpers(server: RunningServer, client: OpenAI) -> None:
    body = {"model": MODEL, "input": "Say hi", "max_output_tokens": 4, "temperature": 0}
    Response.model_validate(httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json())
    streamed = httpx.post(f"{server.url}/v1/responses", json={**body, "stream": True}, timeout=60)
    events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for block in streamed.text.split("\n\n")[:-1]:
        events.validate_json(block.partition("\ndata: ")[2])
    parsed = client.responses.parse(
        model=MODEL, input="A digit?", text_format=Digit, temperature=0, max_output_tokens=60
    )
    assert isinstance(parsed.output_parsed, Digit)
    with client.responses.stream(
        model=MODEL, input="Hi", temperature=0, max_output_tokens=40
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text and final.status == "completed"
    count = client.responses.input_tokens.count(model=MODEL, input="Hi")
    assert final.usage is not None and count.input_tokens == final.usage.input_tokens


def test_raw_responses_and_errors(server: RunningServer, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, max_tokens=2, extra_headers={"x-request-id": "mine"}
    )
    assert raw.request_id == "mine" and int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.parse().choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert wrong.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


@pytest.mark.parametrize("stops", [["5, 6"], ["4", "4, 5"], ["7", "6, 7", "nowhere"]])
def test_stop_strings_never_leak(server: RunningServer, stops: list[str]) -> None:
    """Stop strings are cut wherever they occur, also in accepted drafts and across chunks."""
    options: dict[str, Any] = {"prompt": COUNT, "max_tokens": 13, "n": 2}

    def texts(asked: dict[str, Any]) -> list[str]:
        reply = post(server, "/v1/completions", **options, **asked)
        if "stream" not in asked:
            choices = reply.json()["choices"]
            assert {choice["stop_reason"] for choice in choices} == {stop or None}
            return [choice["text"] for choice in choices]
        found = ["", ""]
        for chunk in chunks(reply):
            found[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        return found

    stop = ""
    full = texts({})[0]
    ends = {each: full.find(each) + len(each) for each in stops if each in full}
    stop = max((each for each in ends if ends[each] == min(ends.values())), key=len)
    shown = {"stop": stops, "include_stop_str_in_output": True}
    asked = [{"stop": stops}, {"stop": stops, "stream": True}, shown, {**shown, "stream": True}]
    if len(stops) > 1:  # what hides a stop and what streams are independent
        asked = asked[1:3]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(texts, asked))
    hidden, included = full[: ends[stop] - len(stop)], full[: ends[stop]]
    assert found == [
        [hidden if options.keys() <= {"stop", "stream"} else included] * 2 for options in asked
    ]


def test_forced_and_forbidden_tokens_are_obeyed(server: RunningServer) -> None:
    def ids(**options: Any) -> list[int]:
        options = {"prompt": COUNT, "max_tokens": 6, "return_token_ids": True, **options}
        reply = post(server, "/v1/completions", **options)
        found: list[int] = reply.json()["choices"][0]["token_ids"]
        return found

    plain = ids()
    assert set(ids(allowed_token_ids=[500, 600], ignore_eos=True)) <= {500, 600}
    assert plain[1] not in ids(logit_bias={str(plain[1]): -100})
    assert ids(logit_bias={"500": 100}) == [500] * 6
    assert plain[:4] == ids(stop=["4"], min_tokens=4)[:4] and len(ids(stop=["4"])) == 2
    assert ids(seed=-7, temperature=1) == ids(seed=-7, temperature=1)
    text = post(server, "/v1/completions", prompt=COUNT, bad_words=["5"], max_tokens=6).json()
    assert "5" not in text["choices"][0]["text"]


def test_prompt_logprobs_agree_between_endpoints(server: RunningServer) -> None:
    echoed = post(server, "/v1/completions", prompt=COUNT, echo=True, logprobs=1, max_tokens=0)
    choice = echoed.json()["choices"][0]
    assert choice["text"] == COUNT == "".join(choice["logprobs"]["tokens"])
    scores = choice["logprobs"]["token_logprobs"]
    other = post(server, "/v1/completions", prompt=COUNT, prompt_logprobs=0, max_tokens=1).json()
    maps = other["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and maps[0] is None
    own = [next(iter(found.values()))["logprob"] for found in maps[1:]]
    assert own == pytest.approx(scores[1:], abs=1e-3)
    chat = post(server, "/v1/chat/completions", messages=HI, prompt_logprobs=1, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "Grüße 🎉 日本語 e\u0301"
    tokens = post(server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert post(server, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    chat = post(server, "/tokenize", messages=HI).json()
    reply = post(server, "/v1/chat/completions", messages=HI, max_tokens=1, return_token_ids=True)
    assert reply.json()["prompt_token_ids"] == chat["tokens"]


def test_the_older_functions_api_is_supported(client: OpenAI) -> None:
    city = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    }
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "The weather in Paris?"}],
        functions=[{"name": "weather", "parameters": city}],
        function_call={"name": "weather"},
        temperature=0,
    )
    call = reply.choices[0].message.function_call
    assert call is not None and call.name == "weather" and json.loads(call.arguments)["city"]


def test_curl_sends_a_long_chunked_body_and_sees_the_headers(server: RunningServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": COUNT, "max_tokens": 2, "user": "x" * 100_000})
    done = subprocess.run(
        [
            *("curl", "-sSi", f"{server.url}/v1/completions", "-H", "Transfer-Encoding: chunked"),
            *("-H", "Content-Type: application/json", "--data-binary", "@-"),
        ],
        input=body, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    head, _, reply = done.stdout.rpartition("\n\n")
    assert "200 OK" in head and "x-request-id: " in head and "openai-processing-ms: " in head
    assert json.loads(reply)["usage"]["completion_tokens"] == 2
