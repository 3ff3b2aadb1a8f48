"""`functions` and `function_call`, and tools of which only some are allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.server.chat_templates.chat_template import ChatTemplate

from ..api_fakes import (
    MODEL,
    ScriptedEngine,
    config_with,
    http_client,
    make_app,
    reply_with,
    sdk_client,
)
from .test_chat import HI, prompt_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": PARAMETERS}
TIME = {"name": "time", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, TIME)]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
ARGUMENTS = '{"city": "Köln"}'


def app_of(engine: ScriptedEngine) -> Any:
    engine.ready.max_model_len = 4096
    return make_app(engine, config_with(tool_call_parser="hermes", reasoning_parser="none"))


async def refused(body: dict[str, Any]) -> dict[str, Any]:
    engine = ScriptedEngine()
    async with http_client(app_of(engine)) as client:
        response = await client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": HI, **body}
        )
    assert response.status_code == 400 and not engine.requests
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("run", [1, 3, 200])
@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [("auto", CALL, "function_call"), ({"name": "weather"}, ARGUMENTS, "stop")],
)
async def test_the_sdk_reads_a_function_call(run: int, choice: Any, text: str, reason: str) -> None:
    engine = ScriptedEngine(reply_with(text, run))
    body: dict[str, Any] = {
        "model": MODEL, "messages": HI, "functions": [WEATHER, TIME], "function_call": choice,
    }  # fmt: skip
    async with sdk_client(app_of(engine)) as client:
        whole = (await client.chat.completions.create(**body)).choices[0]
        name, arguments, content, last = "", "", None, None
        async for chunk in await client.chat.completions.create(**body, stream=True):
            (part,) = chunk.choices
            if call := part.delta.function_call:
                name, arguments = name + (call.name or ""), arguments + (call.arguments or "")
            assert part.delta.tool_calls is None
            content = content if part.delta.content is None else part.delta.content
            last = part.finish_reason or last
    assert whole.message.function_call is not None and whole.message.tool_calls is None
    assert (whole.message.function_call.name, whole.message.content) == ("weather", None)
    assert json.loads(whole.message.function_call.arguments) == {"city": "Köln"}
    assert (name, arguments) == ("weather", whole.message.function_call.arguments)
    assert content is None and (whole.finish_reason, last) == (reason, reason)
    grammar = engine.requests[0].sampling.grammar
    assert (grammar is not None) == (choice != "auto")
    assert '"time"' in prompt_of(engine)


async def test_none_shows_no_function() -> None:
    engine = ScriptedEngine(reply_with(CALL))
    async with sdk_client(app_of(engine)) as client:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            functions=[WEATHER],
            function_call="none",  # type: ignore[list-item]
        )
    assert reply.choices[0].message.content == CALL and "weather" not in prompt_of(engine)


def test_earlier_calls_and_results_reach_templates_as_tool_calls() -> None:
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "rain"},
    ]
    shown = "{{ m.role }} {{ m.tool_calls }} {{ m.tool_call_id }} {{ m.content }}\n"
    lines = (
        ChatTemplate(f"{{% for m in messages %}}{shown}{{% endfor %}}", {})
        .render_chat(chat)
        .text.splitlines()
    )
    assert "'id': 'call00001'" in lines[1] and "'name': 'f'" in lines[1]
    assert lines[2].split() == ["tool", "call00001", "rain"]
    knows = "{% if m.role in ['function'] %}{{ m.name }}={{ m.content }}{% endif %}"
    template = ChatTemplate(f"{{% for m in messages %}}{knows}{{% endfor %}}", {})
    assert template.render_chat(chat).text == "f=rain"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_shown_and_callable(mode: str) -> None:
    engine = ScriptedEngine(reply_with(f'[{{"name": "time", "parameters": {ARGUMENTS}}}]'))
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with http_client(app_of(engine)) as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": choice},
        )
    assert response.status_code == 200, response.text
    assert "weather" not in prompt_of(engine) and '"time"' in prompt_of(engine)
    grammar = engine.requests[0].sampling.grammar
    if mode == "auto":
        assert grammar is None
    else:
        assert grammar is not None and "weather" not in grammar.value
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "time", "arguments": ARGUMENTS}


def _allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": []}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [WEATHER], "tools": TOOLS}, "functions"),
        ({"functions": [WEATHER], "function_call": {"name": "x"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": "always"}, "function_call"),
        ({"function_call": "auto"}, "function_call"),
        ({"tools": TOOLS, "tool_choice": _allowed("x")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": _allowed()}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": TOOLS, "tool_choice": _allowed("time", mode="x")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "king"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "king"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ],
)
async def test_wrong_wishes_are_named(body: dict[str, Any], param: str) -> None:
    assert (await refused(body))["param"] == param
