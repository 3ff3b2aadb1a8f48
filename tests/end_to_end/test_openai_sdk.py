"""The OpenAI SDK and curl work with the real server and model."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from .conftest import RunningServer

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_chat_answers_the_question(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_gives_the_same_text_and_usage(client: OpenAI) -> None:
    plain = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40
    )
    text, usage, reason = "", None, None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert text == plain.choices[0].message.content
    assert reason == plain.choices[0].finish_reason
    assert usage is not None and plain.usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens == plain.usage.prompt_tokens


async def test_the_async_client_runs_requests_concurrently(server: RunningServer) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        import asyncio

        async def ask(n: int) -> str:
            reply = await client.completions.create(
                model=MODEL, prompt=f"Count: {n}, {n + 1}, {n + 2},", temperature=0, max_tokens=12
            )
            return reply.choices[0].text

        together = await asyncio.gather(*(ask(n) for n in range(6)))
        alone = [await ask(n) for n in range(2)]
    assert all(together)
    assert together[0].split(",")[0].strip() == "3"
    assert [text.split(",")[0] for text in alone] == [text.split(",")[0] for text in together[:2]]


def curl(server: RunningServer, flags: str, **body: Any) -> str:
    """What curl prints of the reply to a completion."""
    kind = "Content-Type: application/json"
    command = ["curl", flags, f"{server.url}/v1/completions", "-H", kind, "-d"]
    asked = json.dumps({"model": MODEL, **body})
    found = subprocess.run([*command, asked], capture_output=True, check=True, timeout=60)
    return found.stdout.decode()


def test_curl_completion(server: RunningServer) -> None:
    text = curl(server, "-sS", prompt="1, 2, 3, 4,", max_tokens=8, temperature=0)
    reply = json.loads(text)
    assert reply["object"] == "text_completion"
    assert reply["choices"][0]["text"].startswith(" 5, 6")


def test_curl_stream_ends_with_done(server: RunningServer) -> None:
    text = curl(server, "-sSN", prompt="1, 2, 3,", max_tokens=4, stream=True)
    events = [line for line in text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_seed_repeats_and_speculation_keeps_the_greedy_text(
    client: OpenAI, temperature: float
) -> None:
    prompt = "the cat sat on the mat. the cat sat on the mat. the cat sat on"
    texts = [
        client.completions.create(
            model=MODEL,
            prompt=prompt,
            temperature=temperature,
            seed=7,
            max_tokens=32,
            extra_body={"speculative": {"enabled": enabled}},
        )
        .choices[0]
        .text
        for enabled in ((True, True, False) if temperature == 0.0 else (True, True))
    ]
    assert len(set(texts)) == 1


def test_n_choices_stop_and_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL,
        prompt="1, 2, 3, 4, 5,",
        n=2,
        temperature=0,
        max_tokens=20,
        stop=["9"],
        logprobs=2,
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert "9" not in choice.text and "8" in choice.text
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
