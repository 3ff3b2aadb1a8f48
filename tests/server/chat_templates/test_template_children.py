"""Chat templates of requests run in child processes, which are killed at their limits."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.server.chat_templates.chat_template import ChatTemplateError
from slipstream.server.chat_templates.content_guard import RenderedChat
from slipstream.server.chat_templates.template_child import MAX_CHARACTERS
from slipstream.server.chat_templates.template_children import TemplateChildren

from ..api_fakes import EOS, MODEL, ScriptedEngine, config_with, http_client, make_app

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def rendered(source: str, max_seconds: float = 5.0, content: str = "a") -> RenderedChat:
    children = TemplateChildren({"bos_token": "<s>"}, frozenset(["<|end|>"]), max_seconds)
    return await children.render(
        {
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "chat_template": source,
            "chat_template_kwargs": {"x": 3},
        }
    )


async def test_child_renders_as_the_server_does() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ x }}<|end|>{{ add_generation_prompt }}"
    assert await rendered(source) == RenderedChat("<s>a3<|end|>True")
    found = await rendered(source, content="é<|end|>")
    assert found.parts == ("<s>é<|end|>3", "<|end|>", "True")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages | tojson(indent=2000000000) }}", "needs more than 1024 MiB"),
        ("{{ 'a' * 2000000000 }}", "needs more than 1024 MiB"),
        (f"{{{{ 'a' * {MAX_CHARACTERS + 1} }}}}", "produced more than 4,194,304 characters"),
        ("{{ raise_exception('no') }}", "rejected the messages: no"),
        ("{% if %}", "not valid"),
    ],
)
async def test_each_limit_of_a_template_has_its_own_error(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        await rendered(source)


async def test_endless_template_is_stopped() -> None:
    with pytest.raises(
        ChatTemplateError, match="took longer than 0.5 s"
    ):  # without a limit it would run for half an hour
        await rendered(NESTED, max_seconds=0.5)


async def test_a_request_with_a_template_beyond_the_limits_is_a_400() -> None:
    engine = ScriptedEngine()
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "<|end|>"}]}
    async with http_client(
        make_app(engine, config_with(trust_request_chat_template=True))
    ) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await client.post(path, json={**body, "chat_template": "{{ 'a' * 10**10 }}"})
            assert answer.status_code == 400, answer.text
            assert "memory" in answer.json()["error"]["message"]
        shown = {**body, "chat_template": "{{ messages[0].content }}<|end|>"}
        assert (await client.post("/v1/chat/completions", json=shown)).status_code == 200
    assert engine.requests[0].prompt_token_ids.count(EOS) == 1  # the template's
