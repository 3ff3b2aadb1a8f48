"""The bodies that `loop.py` sends: large or costly values in every field of each endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from traffic import MODEL, TOOL

Make = Callable[[], Any]  # makes a body, or its bytes
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MB = 1_000_000
PROSE = "The keeper of the light wrote, in the storm, of a boat. "


def chat(**more: Any) -> dict[str, Any]:
    """A short chat with these fields."""
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **more}


def text(**more: Any) -> dict[str, Any]:
    """A short completion with these fields."""
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 4, **more}


def prose(size: int) -> str:
    """A text of `size` characters."""
    return (PROSE * (size // len(PROSE) + 1))[:size]


def users(count: int, content: Any) -> list[dict[str, Any]]:
    """`count` user messages with the same content."""
    return [{"role": "user", "content": content}] * count


def tool(**parameters: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    shape = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": "f", "parameters": shape}}


def choices(size: int) -> dict[str, Any]:
    """A schema of about `size` bytes: the keys next to a choice cost work for each branch of it."""
    schema: dict[str, Any] = {}
    for _ in range(12):
        schema = {"anyOf": [{}, {}], "properties": {"a": schema}}
    schema["anyOf"] += [{}] * ((size - len(json.dumps(schema))) // 4)
    return schema


def calling(arguments: str) -> list[dict[str, Any]]:
    """Messages with a tool call that has these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]


def raw(field: str, value: bytes) -> bytes:
    """The bytes of a completion body in which `field` has this raw value."""
    return json.dumps(text()).encode()[:-1] + b', "' + field.encode() + b'": ' + value + b"}"


def nested(count: int) -> str:
    """A JSON list of `count` small objects."""
    return "[" + '{"a":[1,2]},' * count + "1]"


BODIES: dict[str, tuple[str, Make]] = {
    "nothing unusual": (TEXT, text),
    # long texts
    "prompt of 8 MB": (TEXT, lambda: text(prompt=prose(8 * MB))),
    "prompt of one word of 2 MB": (TEXT, lambda: text(prompt="x" * (2 * MB))),
    "prompt of 0.6 MB": (TEXT, lambda: text(prompt="é " * 300_000)),
    "prompt of 8 MB, cut": (TEXT, lambda: text(prompt=prose(8 * MB), truncate_prompt_tokens=50)),
    "2,048 prompts of 4 kB": (TEXT, lambda: text(prompt=[prose(4_000)] * 2_048)),
    "prompt of 2 million ids": (TEXT, lambda: text(prompt=[1, 2] * MB)),
    "100 prompts of 8,000 ids, n = 8": (TEXT, lambda: text(prompt=[[5] * 8_000] * 100, n=8)),
    "chat of 8 MB": (CHAT, lambda: chat(messages=users(1, prose(8 * MB)))),
    "chat of special tokens": (CHAT, lambda: chat(messages=users(1, "<|im_end|>" * 100_000))),
    "chat of special tokens' prefixes": (CHAT, lambda: chat(messages=users(1, "<|im_en" * 90_000))),
    "chat of 8 MB, cut": (
        CHAT,
        lambda: chat(messages=users(1, prose(8 * MB)), truncate_prompt_tokens=-1),
    ),
    "response of 8 MB": (RESPONSES, lambda: {"model": MODEL, "input": prose(8 * MB)}),
    "tokenize 8 MB": ("/tokenize", lambda: {"prompt": prose(8 * MB)}),
    "tokenize a chat of 8 MB": ("/tokenize", lambda: {"messages": users(1, prose(8 * MB))}),
    "tokenize 0.5 MB with strings": (
        "/tokenize",
        lambda: {"prompt": prose(500_000), "return_token_strs": True},
    ),
    "detokenize 2 million ids": ("/detokenize", lambda: {"tokens": [1, 2] * MB}),
    "detokenize 400,000 ids": ("/detokenize", lambda: {"tokens": [400, 500] * 200_000}),
    # many parts
    "chat of 200,000 messages": (CHAT, lambda: chat(messages=users(200_000, "a"))),
    "chat of 40,000 messages": (CHAT, lambda: chat(messages=users(40_000, "a"))),
    "message of 200,000 parts": (
        CHAT,
        lambda: chat(messages=users(1, [{"type": "text", "text": "a"}] * 200_000)),
    ),
    "message of 90,000 parts": (
        CHAT,
        lambda: chat(messages=users(1, [{"type": "text", "text": "a"}] * 90_000)),
    ),
    "response of 90,000 items": (
        RESPONSES,
        lambda: {"model": MODEL, "input": users(90_000, "a")},
    ),
    "10,000 tools": (CHAT, lambda: chat(tools=[TOOL] * 10_000)),
    "1,024 tools": (CHAT, lambda: chat(tools=[TOOL] * 1_024)),
    "tool of 20,000 properties": (
        CHAT,
        lambda: chat(
            tools=[tool(properties={f"p{i}": {"type": "integer"} for i in range(20_000)})]
        ),
    ),
    "arguments of 8 MB": (CHAT, lambda: chat(messages=calling(nested(600_000)))),
    "arguments of 0.5 MB": (CHAT, lambda: chat(messages=calling('{"a":' + nested(40_000) + "}"))),
    "documents of 90,000 entries": (CHAT, lambda: chat(documents=[{"a": "b"}] * 90_000)),
    "template values of 90,000 lists": (
        CHAT,
        lambda: chat(chat_template_kwargs={"a": [[1]] * 90_000}),
    ),
    # JSON itself
    "unknown field of 15 MB": (
        TEXT,
        lambda: raw("surprise", b"[" + b'{"a":[1]},' * 1_400_000 + b"1]"),
    ),
    "unknown text of 15 MB": (TEXT, lambda: text(surprise="x" * (15 * MB))),
    "unknown escapes of 15 MB": (
        TEXT,
        lambda: raw("surprise", b'"' + b"\\u4e00" * 2_500_000 + b'"'),
    ),
    "unknown field of 5 million numbers": (
        TEXT,
        lambda: raw("surprise", b"[" + b"1," * 5 * MB + b"1]"),
    ),
    "unknown field of 900,000 floats": (
        TEXT,
        lambda: raw("surprise", b"[" + b"1.2345e10," * 900_000 + b"1]"),
    ),
    "40,000 unknown names": (TEXT, lambda: text(**{f"name{i}": 1 for i in range(40_000)})),
    "unknown name of 8 MB": (TEXT, lambda: text(**{"x" * (8 * MB): 1})),
    "half a surrogate after 15 MB": (
        TEXT,
        lambda: raw("surprise", b'["' + b"\\n" * 7_000_000 + b'", "\\ud800"]'),
    ),
    "malformed after 15 MB": (
        TEXT,
        lambda: raw("surprise", b'["' + b"\\n" * 7_000_000 + b'", nul]'),
    ),
    "invalid UTF-8 after 15 MB": (
        TEXT,
        lambda: raw("surprise", b'["' + b"a" * 15 * MB + b'\xff"]'),
    ),
    "depth 300,000": (TEXT, lambda: raw("surprise", b"[" * 300_000 + b"]" * 300_000)),
    "a list of 2 million, not an object": (TEXT, lambda: b"[" + b"[]," * 2 * MB + b"1]"),
    # wrong values
    "wrong allowed_token_ids": (TEXT, lambda: text(allowed_token_ids=["x"] * 250_000)),
    "900,000 allowed_token_ids": (TEXT, lambda: text(allowed_token_ids=[1, 2, 3] * 300_000)),
    "unfit allowed_token_ids": (TEXT, lambda: text(allowed_token_ids=[2**31 - 1] * 200_000)),
    "wrong prompts": (TEXT, lambda: text(prompt=[["x"] * 400] * 2_000)),
    "wrong messages": (CHAT, lambda: chat(messages=[{"role": 1}] * 90_000)),
    "wrong parts": (CHAT, lambda: chat(messages=users(1, [{"type": "image"}] * 90_000))),
    "wrong role of 8 MB": (CHAT, lambda: chat(messages=[{"role": "x" * (8 * MB), "content": "a"}])),
    "wrong tool_choice of 8 MB": (
        CHAT,
        lambda: chat(tools=[TOOL], tool_choice={"type": "x" * (8 * MB)}),
    ),
    "wrong items": (RESPONSES, lambda: {"model": MODEL, "input": [{"type": "x"}] * 90_000}),
    "model of 8 MB": (TEXT, lambda: text(model="x" * (8 * MB))),
    "metadata of one key of 8 MB": (TEXT, lambda: text(metadata={"x" * (8 * MB): 1})),
    "90,000 wrong metadata": (TEXT, lambda: text(metadata={f"k{i}": 1 for i in range(90_000)})),
    "90,000 biases": (TEXT, lambda: text(logit_bias={str(i): 1 for i in range(90_000)})),
    "1,024 biases": (TEXT, lambda: text(logit_bias={str(i): 1 for i in range(1_024)})),
    # costly to prepare for the engine
    "16 stops of 0.2 MB, n = 16": (TEXT, lambda: text(stop=["a" * 200_000] * 16, n=16)),
    "16 stops of 4 kB, n = 16": (
        TEXT,
        lambda: text(stop=[chr(97 + i) * 4_000 for i in range(16)], n=16),
    ),
    "1,024 bad words of 8 kB": (TEXT, lambda: text(bad_words=[prose(8_000)] * 1_024)),
    "1,024 bad words": (TEXT, lambda: text(bad_words=[f"word {i}" for i in range(1_024)])),
    "prediction of 8 MB": (
        CHAT,
        lambda: chat(prediction={"type": "content", "content": prose(8 * MB)}),
    ),
    "1,024 stop_token_ids": (TEXT, lambda: text(stop_token_ids=list(range(1_000, 2_024)))),
    "n = 8 of 1,200 ids, decoded": (TEXT, lambda: text(prompt=[5] * 1_200, n=8, max_tokens=40)),
    "n = 128 of 8,000 ids": (TEXT, lambda: text(prompt=[5] * 8_000, n=128)),
    "guided_choice of 40,000": (TEXT, lambda: text(guided_choice=[f"c{i}" for i in range(40_000)])),
    "guided_json of 3 MB of text": (
        TEXT,
        lambda: text(guided_json=json.dumps({"enum": ["x"] * 900_000})),
    ),
    "schema of 40,000 enum values": (
        CHAT,
        lambda: chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"enum": [f"v{i}" for i in range(40_000)]}},
            }
        ),
    ),
    "nested choices of 2 kB": (TEXT, lambda: text(guided_json=choices(2_000))),
    "nested choices of 15 kB": (CHAT, lambda: chat(tools=[tool(**choices(5_000))] * 3)),
    "regex of 8 MB": (TEXT, lambda: text(guided_regex="a" * (8 * MB))),
    "grammar of 8 MB": (TEXT, lambda: text(guided_grammar='root ::= "' + "a" * (8 * MB) + '"')),
    # large answers
    "logprobs of a prompt of 1,500": (
        TEXT,
        lambda: text(prompt=[5] * 1_500, prompt_logprobs=20, max_tokens=1),
    ),
    "echo of 1,500 with logprobs": (
        TEXT,
        lambda: text(prompt=[5] * 1_500, echo=True, logprobs=20, max_tokens=1, stream=True),
    ),
}
