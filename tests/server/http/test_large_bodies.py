"""Bodies and texts that would cost much: bounded before they are parsed, checked or encoded."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.server import json_text
from slipstream.server.errors import InvalidRequest
from slipstream.server.json_schema.shape import Budget
from slipstream.server.json_text import too_many
from slipstream.server.openai_types.chat import ChatCompletionRequest
from slipstream.server.openai_types.completions import CompletionRequest
from slipstream.server.openai_types.responses import ResponsesRequest
from slipstream.server.output.grammars import json_schema_grammar
from slipstream.server.text import bounded_encoding
from slipstream.server.text.bounded_encoding import TooManyTokens
from slipstream.server.text.tokenizer import Tokenizer

from ..api_fakes import MAX_LEN, MODEL, TOKENIZER, ScriptedEngine, http_client, make_app, reply_with

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("[" + "[]," * 100_001 + "1]", "100,000 objects and lists"),
        ("[" + "{}," * 100_001 + "1]", "100,000 objects and lists"),
        ("[" + '"a",' * 300_001 + "1]", "300,000 strings"),
        ("[" + "1," * 1_000_001 + "1]", "1,000,000 values"),
        ("{" + ",".join(f'"{i}":1' for i in range(100_001)) + "}", "100,000 members"),
    ],
)
async def test_body_of_too_many_values_is_refused_before_it_is_parsed(
    field: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.server.http.body._decoded", None)  # not even called
    data = f'{{"model": "{MODEL}", "prompt": "a", "surprise": {field}}}'
    async with http_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/completions", content=data)
    assert answer.status_code == 400 and what in answer.json()["error"]["message"]


def test_what_stands_in_texts_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"a": '[{,:"\\' * 400_000, "b": [1, "\\", '"']}).encode()
    assert text.count(b",") > json_text.MAX_CONTAINERS and too_many(text) is None


@given(
    value=st.recursive(
        st.text(alphabet='a"\\,[]{}:é') | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\,[:'), inner),
        max_leaves=20,
    ),
    piece=st.integers(1, 9),
)
def test_counts_are_those_of_the_parsed_value(value: Any, piece: int) -> None:
    def count(part: Any) -> tuple[int, int]:
        inner = list(part.values()) if isinstance(part, dict) else part
        if not isinstance(inner, list):
            return 0, 0
        below = [count(each) for each in inner]
        names = len(inner) if isinstance(part, dict) else 0
        return 1 + sum(c for c, _ in below), names + sum(n for _, n in below)

    containers, names = count(value)
    data = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_PIECE", piece)
        patch.setattr(json_text, "MAX_CONTAINERS", containers)
        patch.setattr(json_text, "MAX_NAMES", names)
        assert too_many(data) is None
        patch.setattr(json_text, "MAX_CONTAINERS", containers - 1)
        assert too_many(data) is not None or not containers
        patch.setattr(json_text, "MAX_CONTAINERS", containers)
        patch.setattr(json_text, "MAX_NAMES", names - 1)
        assert too_many(data) is not None or not names


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["x"] * 50_000}),
        (CompletionRequest, {"prompt": [["x"] * 20] * 2_000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(50_000)}}),
        (CompletionRequest, {"prompt": "a", "metadata": {str(i): 1 for i in range(50_000)}}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * 50_000}),
        (ChatCompletionRequest, {"messages": [{"role": 1}] * 50_000}),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "image"}] * 50_000}]},
        ),
        (ChatCompletionRequest, {"messages": HI, "documents": [1] * 50_000}),
        (ResponsesRequest, {"input": [{"type": "x"}] * 50_000}),
    ],
)
def test_a_list_of_wrong_values_gets_a_few_complaints(model: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate({"model": MODEL, **body})
    assert found.value.error_count() < 10


@pytest.mark.parametrize(
    "body",
    [
        {"model": "x" * 100_000},
        {"metadata": {"x" * 100_000: 1}},
        {"response_format": {"type": "x" * 100_000}},
        {"stop": ["x" * 4_097]},
        {"bad_words": ["x" * 1_025]},
        {"allowed_token_ids": [1] * ((1 << 18) + 1)},
        {"chat_template_kwargs": {"messages": "x" * 100_000}},
        {"tools": [{"type": "function", "function": {"name": "x" * 100_000}}]},
        {"tools": [{"type": "x" * 100_000}]},
    ],
)
async def test_errors_repeat_no_more_than_a_line(body: dict[str, Any]) -> None:
    full = {"model": MODEL, "messages": HI, **body}
    async with http_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", json=full)
    assert answer.status_code in (400, 404) and len(answer.content) < 2_000
    error = answer.json()["error"]
    assert error["param"].startswith(next(iter(body))) or len(error["param"]) > 300


async def test_long_text_is_refused_after_a_part_of_it_was_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    count = bounded_encoding._count

    def noted(backend: Any, piece: str) -> int:
        counted.append(len(piece))
        return count(backend, piece)

    monkeypatch.setattr(bounded_encoding, "_count", noted)
    async with http_client(make_app(ScriptedEngine())) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "xyz " * 500_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 900_000}]}),
            (
                "/v1/chat/completions",
                {"messages": [{**HI[0], "content": "<|end|>" * 99_000}]},
            ),
            ("/v1/responses", {"input": "x " * 900_000}),
        ):
            counted.clear()
            answer = await client.post(path, json={"model": MODEL, **body})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
            assert "at least" in error["message"] and sum(counted) < 100_000


@pytest.mark.parametrize("keep", [1, 100, -1])
async def test_end_of_a_long_text_has_the_ids_of_the_whole(keep: int) -> None:
    text = "hello abba, this is one of many words. " * 4_000
    chat = {"messages": [{"role": "user", "content": text + "<|end|>"}]}
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", chat)):
            full = {"model": MODEL, "max_tokens": 4, "truncate_prompt_tokens": keep, **body}
            answer = await client.post(path, json=full)
            assert answer.status_code == 200, answer.text
    number = keep if keep > 0 else MAX_LEN - 4
    ids, chat_ids = (request.prompt_token_ids for request in engine.requests)
    assert ids == TOKENIZER.encode(text)[-number:]
    parts = ["<|user|>" + text + "<|end|>", "<|end|>", "<|assistant|>"]
    assert chat_ids == TOKENIZER.encode_parts(parts)[-number:]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 300, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "x" * 300, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "x" * 300, "echo": True, "logprobs": 1, "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{**HI[0], "content": "x" * 300}], "prompt_logprobs": 1},
        ),
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "max_tokens": 400}),
    ],
)
async def test_many_log_probabilities_are_put_together_off_the_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noted(self: Any, token_id: int) -> bytes:
        names.append(threading.current_thread().name)
        return b"x"

    monkeypatch.setattr(Tokenizer, "token_bytes", noted)
    engine = ScriptedEngine(reply_with(run=400, eos=False))
    async with http_client(make_app(engine)) as client:
        answer = await client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    assert len(names) > 256 and {name.split("_")[0] for name in names} == {"long"}


async def test_bodies_above_16_kilobytes_are_parsed_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(data: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return json.loads(data)

    monkeypatch.setattr("slipstream.server.http.body._decoded", noted)
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    async with http_client(make_app(ScriptedEngine())) as client:
        for size in (16_384, 16_385):
            answer = await client.post("/v1/completions", content=body.ljust(size))
            assert answer.status_code == 200, answer.text
    assert threads[0] == threading.current_thread().name
    assert len(threads) == 2 and threads[1].startswith("long_")


def test_count_is_exact_where_the_text_may_be_encoded() -> None:
    with pytest.raises(TooManyTokens) as found:
        TOKENIZER.encode_batch(["ok", "xyz" * 50], limit=100)
    assert (found.value.count, found.value.is_exact) == (150, True)
    assert TOKENIZER.encode_batch(["xyz" * 50], limit=150) == [TOKENIZER.encode("xyz" * 50)]


async def test_arguments_of_a_call_are_bounded() -> None:
    def body(arguments: str) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {
            "model": MODEL,
            "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}],
        }

    async with http_client(make_app(ScriptedEngine())) as client:
        for arguments in ('{"a":' + "[" * 70 + "]" * 70 + "}", "[" + "[]," * 100_001 + "1]"):
            answer = await client.post("/v1/chat/completions", json=body(arguments))
            assert answer.status_code == 400, answer.text
            assert "arguments of a tool call are too large" in answer.json()["error"]["message"]
        for arguments in ("[" * 5_000, '{"a": NaN}', '{"a": "\\ud800"}'):
            answer = await client.post("/v1/chat/completions", json=body(arguments))
            assert answer.status_code == 200, answer.text


async def test_bad_words_have_a_limit_on_their_tokens() -> None:
    words = [f"{i} " + "x " * 100 for i in range(300)]
    engine = ScriptedEngine()
    async with http_client(make_app(engine)) as client:
        body = {"model": MODEL, "messages": HI, "bad_words": words}
        answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "bad_words"
    assert "the maximum is 16384" in error["message"]


def nested_choices(size: int) -> dict[str, Any]:
    """A schema of nearly so many bytes. What stands beside a choice is work for each branch."""
    schema: dict[str, Any] = {"enum": []}
    for _ in range(12):
        schema = {"anyOf": [{}, {}], "properties": {"a": schema}}
    room = size - len(json.dumps(schema, separators=(",", ":")))
    schema["anyOf"] += [{}] * (room // 3)
    return schema


def with_schema(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body that hold this schema."""
    function = {"name": "f", "parameters": schema, "strict": True}
    return {
        "response_format": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema, "strict": True},
            }
        },
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "guided_json": {"guided_json": schema},
        "tools": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        "functions": {"functions": [function]},
        "text": {"text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}},
    }[field]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *(("/v1/completions", field) for field in ("structured_outputs", "guided_json")),
        ("/v1/completions", "response_format"),
        *(("/v1/chat/completions", field) for field in ("response_format", "tools", "functions")),
        ("/v1/chat/completions", "guided_json"),
        ("/v1/responses", "text"),
    ],
)
async def test_schemas_above_two_kilobytes_are_analysed_off_the_loop(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    spend = Budget.spend

    def noted(self: Budget, parts: int) -> None:
        threads.append(threading.current_thread().name)
        spend(self, parts)

    monkeypatch.setattr(Budget, "spend", noted)
    texts = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    async with http_client(make_app(ScriptedEngine())) as client:
        for size, name in ((2_300, "long"), (1_500, threading.current_thread().name)):
            threads.clear()
            body = texts.get(path, {"messages": HI})
            body = {"model": MODEL, **body, **with_schema(field, nested_choices(size))}
            data = json.dumps(body, separators=(",", ":"))
            assert size - 10 < len(data) < size + 300
            await client.post(path, content=data)
            assert len(threads) > 20 and {each.split("_")[0] for each in threads} == {name}


def test_a_schema_that_is_analysed_on_the_loop_takes_little() -> None:
    """10 ms on two busy cores; the bound here allows for a machine that runs other tests, too."""
    schema = nested_choices(2_000)
    best = 1.0
    for _ in range(5):
        began = time.thread_time()
        with pytest.raises(InvalidRequest):
            json_schema_grammar(schema, "guided_json")
        best = min(best, time.thread_time() - began)
    assert best < 0.05
