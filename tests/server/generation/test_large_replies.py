"""Large replies: the bytes of the plain encoder, put together off the loop in short calls."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from slipstream.runner.messages import (
    AddRequest,
    RequestOutput,
    TokenLogprobs,
    pack_logprobs,
    unpack_logprobs,
)
from slipstream.server.generation import large_replies, reply
from slipstream.server.generation.large_replies import (
    PIECE_VALUES,
    encode_in_pieces,
    encode_reply,
)
from slipstream.server.openai_types.replies import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptLogprob,
    PromptTokensDetails,
    TopLogprob,
    Usage,
    encode,
)
from slipstream.server.output import sampling

from ..api_fakes import MODEL, ScriptedEngine, http_client, make_app


def completion(num_choices: int, num_tokens: int, top: int) -> Completion:
    of_prompt: Any = [
        None,
        *[
            {str(i): PromptLogprob(-i / 3, i, f"t{i}é\n") for i in range(top + 1)}
            for _ in range(num_tokens)
        ],
    ]
    choices = [
        CompletionChoice(
            index,
            "word " * num_tokens,
            CompletionLogprobs(
                list(range(num_tokens)),
                [None, *[-0.5] * (num_tokens - 1)],
                [f"token {i}" for i in range(num_tokens)],
                [None, *[{f"x{i}": -0.1 for i in range(top)}] * (num_tokens - 1)],
            ),
            "length",
            token_ids=list(range(num_tokens)),
            prompt_logprobs=of_prompt,
        )
        for index in range(num_choices)
    ]
    return Completion("cmpl-1", 1, "m", "fp", choices)


def chat(num_choices: int, num_tokens: int, top: int) -> ChatCompletion:
    entry = ChatTokenLogprob(
        "é", -0.25, [195, 169], [TopLogprob(f"x{i}", -0.5 * i, [120]) for i in range(top)]
    )
    choices = [
        ChatChoice(i, ChatMessage("text"), "stop", ChatLogprobs([entry] * num_tokens))
        for i in range(num_choices)
    ]
    usage = Usage(1, 2, 3, PromptTokensDetails(), CompletionTokensDetails())
    return ChatCompletion("chatcmpl-1", 1, "m", "fp", choices, usage)


SHAPES = [
    (1, 1, 0),
    (1, 5, 3),
    (3, 700, 0),
    (1, 3000, 5),
    (2, 40, 1000),
    (300, 20, 2),
    (1, 1, 9000),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [completion, chat])
async def test_pieces_are_what_one_call_gives(make: Any, shape: tuple[int, int, int]) -> None:
    reply = make(*shape)
    assert encode_in_pieces(reply) == await encode_reply(reply) == encode(reply)


async def test_no_call_of_the_encoder_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, str, bool]] = []

    def timed(value: Any) -> bytes:
        began = time.thread_time()
        data = encode(value)
        taken = time.thread_time() - began
        calls.append((taken, threading.current_thread().name, len(data) < 1_000_000))
        return data

    monkeypatch.setattr(large_replies, "encode", timed)
    reply = completion(2, 12_000, 20)
    began = time.thread_time()
    whole = encode(reply)
    alone = time.thread_time() - began
    assert await encode_reply(reply) == whole
    assert len(calls) > 12_000 * 20 * 2 * 2 // PIECE_VALUES
    assert {name.split("_")[0] for _, name, _ in calls} == {"long"}
    # The lists were encoded in small parts; larger calls only copy what was encoded before.
    assert sum(taken for taken, _, is_small in calls if not is_small) < 0.85 * alone
    assert max(taken for taken, _, is_small in calls if is_small) < max(0.05, alone / 5)
    calls.clear()
    await encode_reply(completion(1, 3, 1))
    assert [name for _, name, _ in calls] == [threading.current_thread().name]


def test_packed_log_probabilities_come_in_short_pieces() -> None:
    items = [TokenLogprobs(i, -i / 7, i, list(range(20)), [-0.5] * 20) for i in range(5_000)]
    pieces = [*pack_logprobs(items[:4_000]), *pack_logprobs(items[4_000:])]
    assert unpack_logprobs(pieces) == [None, *items] and unpack_logprobs([]) == [None]
    assert len(pieces) >= 6 and max(map(len, pieces)) < 300_000
    assert pack_logprobs([]) == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[5] * 30, [6] * 20], "prompt_logprobs": 1}, None),
        ("/v1/completions", {"prompt": [5] * 51, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5] * 17, "prompt_logprobs": 5}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5] * 26, "prompt_logprobs": 1, "n": 2}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5] * 26, "echo": True, "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": [5] * 26, "logprobs": 3}, None),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "n": 8}, None),
        ("/v1/chat/completions", {"prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
async def test_log_probabilities_of_prompts_have_a_limit(
    path: str, body: dict[str, Any], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", 100)
    if path.endswith("chat/completions"):
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    async with http_client(make_app(ScriptedEngine())) as client:
        answer = await client.post(path, json={"model": MODEL, "max_tokens": 1, **body})
    if param is None:
        assert answer.status_code == 200, answer.text
        return
    error = msgspec.json.decode(answer.content)["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "The maximum is 100" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_log_probabilities_of_a_whole_reply_have_a_limit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole reply is held until its end; a stream is not, and has none."""
    monkeypatch.setattr(reply, "MAX_LOGPROBS", 5)
    tokens = [TokenLogprobs(104, -0.5, 1, [104], [-0.5]) for _ in range(3)]  # two values each

    def script(request: AddRequest) -> list[RequestOutput | Exception | float]:
        end = RequestOutput(request.request_id, [], finish_reason="length")
        return [
            *(RequestOutput(request.request_id, [104], logprobs=[entry]) for entry in tokens),
            end,
        ]

    chat = path.endswith("chat/completions")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {}
    body |= {"logprobs": True, "top_logprobs": 1} if chat else {"prompt": "hi", "logprobs": 1}
    body |= {"model": MODEL, "max_tokens": 3}
    engine = ScriptedEngine(script)
    async with http_client(make_app(engine)) as client:
        whole = await client.post(path, json=body)
        stream = await client.post(path, json=body | {"stream": True})
        monkeypatch.setattr(reply, "MAX_LOGPROBS", 6)
        fitting = await client.post(path, json=body)
    error = msgspec.json.decode(whole.content)["error"]
    assert (whole.status_code, error["param"]) == (400, "logprobs")
    assert "more than 5 log probabilities" in error["message"]
    assert stream.status_code == fitting.status_code == 200 and "error" not in stream.text
