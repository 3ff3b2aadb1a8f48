"""Structured output and forced tool calls with the real server, through the OpenAI SDK."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .conftest import RunningServer

MODEL = "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "Describe a person in JSON."}]
Word = Annotated[str, Field(max_length=12)]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Word
    age: Annotated[int, Field(ge=0, le=120)]
    mood: Literal["good", 'b"ad', "übel"]


KINDS: list[Any] = [
    *(Person, bool, None, Literal["a", 2], Word),
    Annotated[list[Annotated[int, Field(ge=-5, le=5)]], Field(min_length=1, max_length=3)],
    tuple[bool, Word],
    Person | Annotated[str, Field(pattern=r"^[a-z]{2}-\d{3}$")],
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


def ask(client: OpenAI, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(
        model=MODEL, messages=ASK, **({"max_tokens": 150} | options)
    )


def test_sixteen_concurrent_replies_match_their_schemas(client: OpenAI) -> None:
    def answer(number: int) -> tuple[int, ChatCompletion]:
        schema = TypeAdapter(KINDS[number % 8]).json_schema()
        wanted: Any = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        greedy = {"temperature": 0} if number < 8 else {"seed": number}
        return number, ask(client, response_format=wanted, **greedy)

    with ThreadPoolExecutor(16) as pool:
        for number, reply in pool.map(answer, range(16)):
            assert reply.choices[0].finish_reason == "stop"
            text = reply.choices[0].message.content or ""
            TypeAdapter(KINDS[number % 8]).validate_json(text, strict=True)


def test_the_sdk_parses_a_pydantic_model(client: OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=150
    )
    person = reply.choices[0].message.parsed
    assert isinstance(person, Person) and 0 <= person.age <= 120


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"guided_choice": ["red", "blue"]}, {"red", "blue"}),
        ({"guided_regex": "ab?c"}, {"abc", "ac"}),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, {"yes", "no"}),
        ({"guided_choice": ["red", "blue"], "min_tokens": 20}, {"red", "blue"}),
        ({"guided_choice": ["red", "blue"], "ignore_eos": True}, {"red", "blue"}),
    ],
)
def test_replies_match_choices_regexes_and_grammars(
    client: OpenAI, options: Any, texts: set[str]
) -> None:
    reply = ask(client, extra_body=options, n=2)
    assert {choice.message.content for choice in reply.choices} <= texts
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar"),
        ({"guided_json": {"type": "string", "minLength": 5, "maxLength": 3}}, "guided_json"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "nothing"}},
                }
            },
            "response_format",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_an_impossible_grammar_is_a_400_that_names_the_parameter(
    client: OpenAI, options: Any, param: str, stream: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=options, stream=stream)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert ".cc" not in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": {"regex": "[0-9]"}, "allowed_token_ids": [5]},
        {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["y", "ye", "yes"]},
        {"allowed_token_ids": [2], "min_tokens": 3},
    ],
)
def test_options_that_leave_no_token_are_a_400(client: OpenAI, options: Any, stream: bool) -> None:
    with pytest.raises(BadRequestError, match="no token") as caught:
        ask(client, extra_body=options, stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert ask(client, max_tokens=2).choices[0].finish_reason == "length"


def test_options_that_leave_no_token_later_end_a_stream_with_an_error(client: OpenAI) -> None:
    """After "a" the pattern asks for "b", whose only spellings are forbidden."""
    options = {"structured_outputs": {"regex": "ab"}, "bad_words": ["b", "ab"]}
    with pytest.raises(APIError, match="leave no token to choose after 1 tokens") as caught:
        for _ in ask(client, extra_body=options, stream=True):  # type: ignore[union-attr]
            pass
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_calls_have_valid_arguments(client: OpenAI, choice: Any, stream: bool) -> None:
    options: dict[str, Any] = {"parallel_tool_calls": False, "max_tokens": 200}
    if stream:
        with client.chat.completions.stream(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, **options
        ) as events:
            events.until_done()
            reply: Any = events.get_final_completion()
    else:
        reply = ask(client, tools=[TOOL], tool_choice=choice, **options)
    # As in OpenAI's API, a call of a function that the client named ends with "stop".
    reason = "tool_calls" if choice == "required" else "stop"
    assert reply.choices[0].finish_reason == reason
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert len(arguments["city"]) <= 20 and 1 <= arguments["days"] <= 9


def test_other_streams_go_on_while_a_slow_schema_compiles(
    server: RunningServer, client: OpenAI
) -> None:
    times: list[float] = []
    begun, over = threading.Event(), threading.Event()

    def neighbour() -> None:
        with client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=250,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream:
            for _ in stream:
                times.append(time.monotonic())
                if len(times) == 10:
                    begun.set()
                if over.is_set():
                    break

    thread = threading.Thread(target=neighbour)
    thread.start()
    assert begun.wait(60)
    names = [f"k{n}" for n in range(450)]
    schema = {"type": "object", "properties": {n: {"type": "string"} for n in names}}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "guided_json": schema}
    start = time.monotonic()
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    end = time.monotonic()
    over.set()
    thread.join()
    during = [t for t in times if start < t < end]
    longest = max(b - a for a, b in zip([start, *during], [*during, end], strict=True))
    assert len(during) >= 5 and longest < (end - start) / 2
