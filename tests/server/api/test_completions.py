"""/v1/completions through the OpenAI SDK and httpx, on a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from slipstream.configs.schema import SpeculativeConfig
from slipstream.server.request_stream import RequestStream

from ..api_fakes import (
    EOS,
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


async def post(engine: ScriptedEngine, **body: Any) -> dict[str, Any]:
    async with http_client(make_app(engine)) as client:
        full = {"model": MODEL, "prompt": "hello", "max_tokens": 100, **body}
        response = await client.post("/v1/completions", json=full)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result


async def chunks(engine: ScriptedEngine, **body: Any) -> list[dict[str, Any]]:
    async with http_client(make_app(engine)) as client:
        full = {"model": MODEL, "prompt": "hello", "max_tokens": 100, "stream": True, **body}
        response = await client.post("/v1/completions", json=full)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(data) for data in events[:-1]]


async def test_sdk_reads_a_whole_completion() -> None:
    engine = ScriptedEngine()
    async with sdk_client(make_app(engine)) as client:
        reply = await client.completions.create(model=MODEL, prompt="hello", max_tokens=100)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == REPLY and reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 2  # "hell", "o"
    assert reply.usage.completion_tokens == len(TOKENIZER.encode(REPLY)) + 1  # with EOS
    assert reply.usage.total_tokens == 2 + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert reply.system_fingerprint is not None and reply.system_fingerprint.startswith("fp_")
    assert not engine.open and not engine.aborted


@pytest.mark.parametrize("run", [1, 2, 3, 7, 100])
async def test_stream_joins_to_the_whole_text(run: int) -> None:
    found = await chunks(ScriptedEngine(reply_with(run=run)))
    assert "".join(c["choices"][0]["text"] for c in found) == REPLY
    assert [c["choices"][0]["finish_reason"] for c in found][-1] == "stop"
    assert all(c["choices"][0]["finish_reason"] is None for c in found[:-1])
    assert all("usage" not in c for c in found)
    assert "\ufffd" not in json.dumps(found)


async def test_outputs_that_wait_leave_as_one_chunk() -> None:
    class Eager(ScriptedEngine):
        def submit(self, request: Any) -> Any:
            stream = RequestStream(request.request_id)
            for output in self.script(request):
                stream.put(output)  # type: ignore[arg-type]
            return stream

    (chunk,) = await chunks(Eager(), logprobs=0)
    choice = chunk["choices"][0]
    assert choice["text"] == REPLY and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == 18
    two = [c["choices"][0] for c in await chunks(Eager(), n=2)]
    for index in range(2):
        assert "".join(c["text"] for c in two if c["index"] == index) == REPLY


async def test_usage_comes_last_and_is_null_before() -> None:
    found = await chunks(ScriptedEngine(), stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in found[:-1])
    assert found[-1]["choices"] == []
    whole = await post(ScriptedEngine())
    assert found[-1]["usage"] == whole["usage"]


async def test_continuous_usage_grows() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await chunks(ScriptedEngine(), stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in found]
    assert counts == sorted(counts) and counts[0] == 3


async def test_default_is_sixteen_tokens() -> None:
    engine = ScriptedEngine(reply_with("x" * 40))
    reply = await post(engine, max_tokens=None)
    assert engine.requests[0].sampling.max_tokens == 16
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["choices"][0]["text"] == "x" * 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [TOKENIZER.encode("ab")]),
        (["a", "bc"], [TOKENIZER.encode("a"), TOKENIZER.encode("bc")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    engine = ScriptedEngine()
    reply = await post(engine, prompt=prompt, n=2)
    assert [r.prompt_token_ids for r in engine.requests] == [ids for ids in expected for _ in "12"]
    assert [c["index"] for c in reply["choices"]] == list(range(2 * len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert reply["usage"]["completion_tokens"] == 2 * len(expected) * 18


async def test_children_get_consecutive_seeds() -> None:
    engine = ScriptedEngine()
    await post(engine, n=3, seed=41)
    assert [r.sampling.seed for r in engine.requests] == [41, 42, 43]
    await post(engine)
    await post(engine)
    first, second = (r.sampling.seed for r in engine.requests[3:])
    assert first != second and 0 <= first < 2**63


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_without_leaking(stream: bool) -> None:
    for run in (1, 2, 5, 50):
        engine = ScriptedEngine(reply_with("say hello world, again and again", run=run))
        body = {"stop": ["world", "nothing"], "logprobs": 1}
        if stream:
            found = [c["choices"][0] for c in await chunks(engine, **body)]
            text = "".join(c["text"] for c in found)
            tokens = [t for c in found if c["logprobs"] for t in c["logprobs"]["tokens"]]
            last = found[-1]
        else:
            last = (await post(engine, **body))["choices"][0]
            text, tokens = last["text"], last["logprobs"]["tokens"]
        assert text == "say hello " and "".join(tokens) == text
        assert last["finish_reason"] == "stop" and last["stop_reason"] == "world"
        assert engine.open == set()  # what still ran was aborted


async def test_stop_string_counts_tokens_to_its_end_and_can_be_shown() -> None:
    engine = ScriptedEngine(reply_with("abcdefgh", run=8, eos=False))
    reply = await post(engine, stop="cd", include_stop_str_in_output=True, return_token_ids=True)
    assert reply["choices"][0]["text"] == "abcd"
    assert reply["choices"][0]["token_ids"] == TOKENIZER.encode("abcd")  # "ab", "c", "d"
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("run", [1, 3, 50])
async def test_ids_counts_and_logprobs_at_a_stop_string_are_the_same_tokens(
    run: int, stream: bool
) -> None:
    text = "say hello wor wor world, again"
    engine = ScriptedEngine(reply_with(text, run=run))
    body = {"stop": "world", "logprobs": 1, "return_token_ids": True}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        found = [c for c in await chunks(engine, **body) if c["choices"]]
    else:
        found = [await post(engine, **body)]
    ids: list[int] = []
    names: list[str] = []
    for chunk in found:
        (choice,) = chunk["choices"]
        logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
        assert len(logprobs["tokens"]) == len(choice["token_ids"])  # in every chunk
        ids += choice["token_ids"]
        names += logprobs["tokens"]
        assert chunk["usage"]["completion_tokens"] == len(ids)
        assert all(offset <= len("say hello wor wor ") for offset in logprobs["text_offset"])
    assert ids == TOKENIZER.encode("say hello wor wor world")
    assert "".join(names) == "say hello wor wor " and names[-5:] == [""] * 5


async def test_min_tokens_come_before_stop_strings() -> None:
    engine = ScriptedEngine(reply_with("xyxyxyxy", run=3, eos=False))
    reply = await post(engine, stop="y", min_tokens=4)
    assert reply["choices"][0]["text"] == "xyxyx"


async def test_stop_token_ids_are_named_and_hidden() -> None:
    def script(request: Any) -> Any:
        from slipstream.runner.messages import RequestOutput

        ids = TOKENIZER.encode("ab!")
        return [RequestOutput(request.request_id, ids, finish_reason="stop", stop_token_id=ids[-1])]

    bang = TOKENIZER.encode("!")
    reply = await post(ScriptedEngine(script), stop_token_ids=bang)
    assert reply["choices"][0]["text"] == "ab" and reply["choices"][0]["stop_reason"] == bang[0]
    shown = await post(ScriptedEngine(script), stop_token_ids=bang, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == "ab!"


async def test_ignore_eos_leaves_only_the_clients_stop_ids() -> None:
    engine = ScriptedEngine()
    await post(engine)
    await post(engine, ignore_eos=True, stop_token_ids=[7])
    assert engine.requests[0].sampling.stop_token_ids == [EOS]
    assert engine.requests[1].sampling.stop_token_ids == [7]


async def test_logprobs_are_four_parallel_lists() -> None:
    choice = (await post(ScriptedEngine(), logprobs=2))["choices"][0]
    found = choice["logprobs"]
    assert {len(found[key]) for key in found} == {18}
    assert found["tokens"][:4] == ["H", "e", "ll", "o"] and found["tokens"][-1] == ""
    assert found["text_offset"][:5] == [0, 1, 2, 4, 5]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    assert all(len(top) == 2 for top in found["top_logprobs"])
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    assert found["token_logprobs"][0] == -0.125


async def test_streamed_logprobs_equal_whole_ones() -> None:
    whole = (await post(ScriptedEngine(), logprobs=1, echo=True))["choices"][0]
    parts = [
        c["choices"][0]["logprobs"] for c in await chunks(ScriptedEngine(), logprobs=1, echo=True)
    ]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts if part for x in part[key]] == whole["logprobs"][key]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first_in_every_choice(stream: bool) -> None:
    engine = ScriptedEngine()
    if stream:
        texts = ["", ""]
        for chunk in await chunks(engine, echo=True, n=2, logprobs=0):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        choices = (await post(engine, echo=True, n=2, logprobs=0))["choices"]
        texts = [c["text"] for c in choices]
        assert choices[0]["logprobs"]["token_logprobs"][0] is None
        assert choices[1]["logprobs"]["tokens"][:2] == ["hell", "o"]
        assert choices[1]["logprobs"]["text_offset"][:3] == [0, 4, 5]
    assert texts == ["hello" + REPLY] * 2
    assert [r.sampling.prompt_logprobs for r in engine.requests] == [0, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_alone_scores_the_prompt(stream: bool) -> None:
    body = {"echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        found = await chunks(ScriptedEngine(), stream_options={"include_usage": True}, **body)
        usage, choices = found[-1]["usage"], [c["choices"][0] for c in found[:-1]]
    else:
        reply = await post(ScriptedEngine(), **body)
        usage, choices = reply["usage"], reply["choices"]
    assert "".join(c["text"] for c in choices) == "hello"
    assert choices[0]["logprobs"]["tokens"] == ["hell", "o"]
    assert choices[-1]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0


async def test_best_of_keeps_the_likeliest_and_counts_all() -> None:
    def script(request: Any) -> Any:
        word = "bad" if request.request_id.endswith("-0") else "good"
        outputs = reply_with(word)(request)
        if word == "good":
            for output in outputs:
                for entry in output.logprobs:  # type: ignore[union-attr]
                    entry.logprob = -0.01
        return outputs

    reply = await post(ScriptedEngine(script), best_of=2, n=1)
    assert [c["text"] for c in reply["choices"]] == ["good"]
    assert reply["choices"][0]["index"] == 0 and reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 4 + 5


async def test_prompt_logprobs_in_vllms_form() -> None:
    choice = (await post(ScriptedEngine(), prompt_logprobs=1))["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {"78": {"logprob": -0.25, "rank": 1, "decoded_token": "o"}}


async def test_return_token_ids_whole_and_streamed() -> None:
    choice = (await post(ScriptedEngine(), return_token_ids=True))["choices"][0]
    expected = [*TOKENIZER.encode(REPLY), EOS]
    assert choice["token_ids"] == expected and choice["prompt_token_ids"] == [258, 78]
    found = [c["choices"][0] for c in await chunks(ScriptedEngine(), return_token_ids=True)]
    assert [i for c in found for i in c["token_ids"]] == expected
    assert found[0]["prompt_token_ids"] == [258, 78] and "prompt_token_ids" not in found[1]


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
async def test_only_drafts_from_the_prediction_count_as_predicted(method: str) -> None:
    engine = ScriptedEngine(reply_with("abcabc", run=3, eos=False))
    config = replace(config_with(), speculative=SpeculativeConfig(method=method))
    prediction = {"type": "content", "content": [{"type": "text", "text": "abc"}]}
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 6, "prediction": prediction}
    async with http_client(make_app(engine, config)) as client:
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert engine.requests[0].sampling.prediction_token_ids == TOKENIZER.encode("abc")
    details = usage["completion_tokens_details"]
    counted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    drafted = 3 * len(engine.script(engine.requests[0]))
    assert drafted > 0 and counted == (drafted if method == "ngram" else 0)


async def test_sampling_fields_reach_the_worker() -> None:
    engine = ScriptedEngine()
    await post(
        engine,
        **{"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "priority": 7},
        **{"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2},
        **{"logit_bias": {"5": -100, "6": 3.5}, "allowed_token_ids": [5, 6], "bad_words": ["ab"]},
        **{"speculative": {"enabled": False, "max_tokens": 2}, "min_tokens": 3},
        response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    )
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        0,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.repetition_penalty == 1.2 and request.priority == 7
    assert sampling.logit_bias == {5: -100, 6: 3.5} and sampling.allowed_token_ids == [5, 6]
    assert sampling.bad_words_token_ids == [TOKENIZER.encode("ab"), TOKENIZER.encode(" ab")]
    assert sampling.speculative_enabled is False and sampling.speculative_max_tokens == 2
    assert sampling.min_tokens == 3
    assert sampling.grammar is not None
    assert (sampling.grammar.kind, sampling.grammar.value) == ("json_schema", '{"type":"object"}')


async def test_truncation_keeps_the_end() -> None:
    engine = ScriptedEngine()
    await post(engine, prompt=list(range(100)), truncate_prompt_tokens=3)
    await post(engine, prompt=[1] * (MAX_LEN + 50), truncate_prompt_tokens=-1, max_tokens=1)
    assert engine.requests[0].prompt_token_ids == [97, 98, 99]
    assert len(engine.requests[1].prompt_token_ids) == MAX_LEN - 1
    # What is kept leaves room for the output, also for the default of 16 tokens.
    await post(engine, prompt=[1] * (MAX_LEN + 50), truncate_prompt_tokens=-1, max_tokens=None)
    assert len(engine.requests[2].prompt_token_ids) == MAX_LEN - 16
    await post(engine, prompt=[1, 2, 3], truncate_prompt_tokens=-1)
    assert engine.requests[3].prompt_token_ids == [1, 2, 3]


async def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    engine = ScriptedEngine()
    await post(engine, prompt=[1] * (MAX_LEN - 5), max_tokens=5)
    assert engine.requests[0].sampling.max_tokens == 5


async def test_long_text_is_tokenized_all_the_same() -> None:
    engine = ScriptedEngine()
    engine.ready.max_model_len = 20_000
    await post(engine, prompt="b" * 9000, max_tokens=1)
    await post(engine, prompt=["b" * 5000, "a"], max_tokens=1)
    assert [len(r.prompt_token_ids) for r in engine.requests] == [9000, 5000, 1]


async def test_unknown_parameters_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(ScriptedEngine(), config_with())
    async with http_client(app) as client:
        for _ in range(2):
            body = {"model": "alias", "prompt": "x", "max_tokens": 1, "shoe_size": 43}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200 and response.json()["model"] == "alias"
    assert sum("shoe_size" in record.getMessage() for record in caplog.records) == 1
