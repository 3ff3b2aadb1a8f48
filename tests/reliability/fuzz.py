"""Sends thousands of malformed and extreme bodies to every POST route of a live server.

Run `python tests/reliability/fuzz.py --bodies 10000`. Each body is a valid one with a few mutations
of its values or bytes; the same seed repeats the run. No answer may be a 5xx, and every rejection
must have OpenAI's error object. Afterwards no batch row or KV block may be in use, and a greedy
request must get the same text as before.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from traffic import MODEL, SCHEMA, TOOL, RunningServer, at_rest, mixed_request  # noqa: E402

PATIENCE = 4.0  # seconds to wait for an answer, since a mutated request may generate a long text
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "messages": TOOL_TURNS, "tools": [TOOL], "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 2}),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        },
    ),
    ("/tokenize", {"model": MODEL, "prompt": "some text"}),
    ("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}),
    ("/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
    ("/v1/embeddings", {"model": MODEL, "input": "text"}),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53, -(2**63), 2**64),
    *(10**30, "", " ", "a", "\x00", "\ufeff", "\U0001f600", "null", "NaN", "-1", "auto", "../x"),
    *("x" * 5000, [], [[]], [None], [0], [[1, 2]], ["a", 1], {}, {"": None}, {"type": None}),
    *({"type": "text"}, {"type": "object"}, {"$ref": "#"}, [{}], [{"role": "user"}], "%s%n{0}"),
    *("(" * 500, "[a-z]{1,99999}", "(a+)+$", '{"type":"string"}', "\u202e\u0301", "<|im_start|>"),
]
RAW = [
    "NaN",
    "Infinity",
    "1e999",
    "-",
    '"\\ud800"',
    '"\\udfff\\ud800"',
    "\x01",
    "[" * 5000,
    "{" * 200,
]
EXTRA = [
    *(
        "suffix",
        "echo",
        "logprobs",
        "top_logprobs",
        "best_of",
        "n",
        "stop",
        "seed",
        "user",
        "store",
    ),
    *("tools", "tool_choice", "functions", "response_format", "structured_outputs", "guided_regex"),
    *(
        "guided_json",
        "guided_grammar",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
        "priority",
        "top_k",
    ),
    *("min_p", "prompt_logprobs", "truncate_prompt_tokens", "stop_token_ids", "bad_words", "audio"),
    *("allowed_token_ids", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("add_generation_prompt", "speculative", "prediction", "modalities", "reasoning_effort"),
    *("temperature", "top_p", "repetition_penalty", "presence_penalty", "stream", "surprise"),
    *("stream_options", "return_token_ids", "metadata", "parallel_tool_calls", "instructions"),
    *("previous_response_id", "documents", "max_tokens", "max_completion_tokens", "messages"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths (keys and indices) of a JSON value and of all values inside it."""
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


def mutate(body: Any, chance: random.Random) -> Any:
    """Change one random part of a body in place; returns the body or its replacement."""
    if not isinstance(body, dict | list) or body == []:
        return copy.deepcopy(chance.choice(VALUES))
    *above, last = chance.choice(places(body)[1:] or [("surprise",)])
    parent: Any = body
    for key in above:
        parent = parent[key]
    kind = chance.randrange(6)
    if kind == 0 and last in (parent if isinstance(parent, dict) else range(len(parent))):
        del parent[last]
    elif kind == 1 and isinstance(body, dict):
        body[chance.choice(EXTRA)] = copy.deepcopy(chance.choice(VALUES))
    elif kind == 2 and isinstance(parent, list):
        parent.extend(copy.deepcopy(parent) * chance.randint(1, 60))
    elif kind == 3 and (isinstance(parent, list) or last in parent):
        value = parent[last]
        for _ in range(chance.choice((1, 3, 70))):
            value = [value] if chance.random() < 0.5 else {"a": value}
        parent[last] = value
    else:
        parent[last] = copy.deepcopy(chance.choice(VALUES))
    return body


def damage(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one random change."""
    at = chance.randrange(len(data) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + b"\xff\xfe\xc3\x28" + data[at:],
        lambda: data[:at] + chance.choice(RAW).encode("utf-8", "surrogatepass") + data[at:],
        lambda: data.replace(b":2", b":" + chance.choice(RAW).encode(), 1),
        lambda: data + data,
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"",
        lambda: b"\x1f\x8b" + data,
    ]
    return chance.choice(changes)()


def fuzzed(chance: random.Random) -> tuple[str, bytes]:
    """Return a path and the bytes of a mutated body."""
    if chance.random() < 0.3:
        path, valid = mixed_request(chance, max_tokens=3)
    else:
        path, valid = chance.choice(SEEDS)
    body: Any = copy.deepcopy(valid)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        body = mutate(body, chance)
    if chance.random() < 0.02:
        body = copy.deepcopy(chance.choice(VALUES))
    data = json.dumps(body, separators=(",", ":")).encode()
    return path, damage(data, chance) if chance.random() < 0.2 else data


def fault_of(response: httpx.Response) -> str | None:
    """Describe what is wrong with an answer; None if nothing is."""
    if response.status_code >= 500:
        return "a server error"
    if response.status_code < 400:
        return None
    try:
        error = response.json()["error"]
        param, code = error["param"], error["code"]
        whole = bool(error["message"]) and bool(error["type"])
    except (ValueError, KeyError, TypeError):
        return "no error object"
    strings = isinstance(param, str | None) and isinstance(code, str | None)
    return None if whole and strings else "a malformed error object"


async def attack(
    url: str, bodies: int, seed: int, parallel: int = 8
) -> tuple[Counter[str], list[str]]:
    """Send all bodies, `parallel` at a time; returns counts by status, and the faults."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    numbers = iter(range(bodies))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            path, data = fuzzed(random.Random(f"{seed} {number}"))
            try:
                async with asyncio.timeout(PATIENCE):
                    response = await http.post(path, content=data)
            except TimeoutError:
                counts["timed out"] += 1
                continue
            except httpx.TransportError as error:
                faults.append(f"{number} {path} {type(error).__name__}: {data[:500]!r}")
                continue
            counts[str(response.status_code)] += 1
            if problem := fault_of(response):
                got = f"{response.status_code} {response.text[:200]}"
                faults.append(f"{number} {path} {problem}: {got} <- {data[:500]!r}")

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as http:
        await asyncio.gather(*(client(http) for _ in range(parallel)))
    return counts, faults


def greedy_text(url: str) -> str:
    """The text of a greedy request, which must be the same before and after the fuzzing."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def run(server: RunningServer, bodies: int, seed: int) -> list[str]:
    """Fuzz a server and check its state afterwards; returns the faults."""
    worker, before = server.worker, greedy_text(server.url)
    failed = server.metric("request_success_total", finished_reason="error")
    counts, faults = asyncio.run(attack(server.url, bodies, seed))
    print(f"{bodies} bodies: {dict(sorted(counts.items()))}")
    if left := at_rest(server, 40):  # a grammar may compile for 30 s
        faults.append(f"still in use after all requests: {left}")
    if server.worker != worker:
        faults.append("the worker died")
    if (after := greedy_text(server.url)) != before:
        faults.append(f"the greedy text changed to {after!r}")
    failed = server.metric("request_success_total", finished_reason="error") - failed
    if failed:
        faults.append(f"{failed:g} requests failed")
    return faults


def main() -> int:
    """Fuzz a server of its own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    server = RunningServer().wait_ready()
    try:
        faults = run(server, options.bodies, options.seed)
    finally:
        status = server.stop()
    print("\n".join(faults[:50]) or "no faults")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
