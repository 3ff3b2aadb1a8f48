"""What chat templates can do beyond transformers: parts, roles, tools, errors, the sandbox."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from slipstream.server.chat_templates.chat_template import ChatTemplate, ChatTemplateError

from .rendering import text_of

TEMPLATES = {p.stem: p.read_text() for p in Path(__file__).parents[1].glob("templates/*.jinja")}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LINES = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
USER = {"role": "user", "content": "Hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}


def render(source: Any, messages: list[Any], **kwargs: Any) -> str:
    return text_of(ChatTemplate(source, SPECIAL), messages, **kwargs)


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3_tools", "mistral", "qwen3_thinking"])
def test_parts_become_text_for_templates_that_read_strings(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    joined = {"role": "user", "content": "a\nb"}
    assert template.content_format == "string"
    assert text_of(template, [PARTS]) == text_of(template, [joined])


def test_parts_stay_parts_for_templates_that_read_them() -> None:
    template = ChatTemplate(TEMPLATES["gemma"], SPECIAL)
    assert template.content_format == "openai"
    assert "<start_of_turn>user\nab<end_of_turn>" in text_of(template, [PARTS])
    assert "<start_of_turn>user\nHi<end_of_turn>" in text_of(template, [USER])


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m['content'] %}({{ p.text }}){% endfor %}",
        "{% set c = m.content %}{% for p in c %}({{ p.text }}){% endfor %}",
        "{% for p in m.content | selectattr('type', 'eq', 'text') %}({{ p.text }}){% endfor %}",
    ],
)
def test_text_becomes_parts_where_only_parts_are_read(loop: str) -> None:
    assert render("{% for m in messages %}" + loop + "{% endfor %}", [USER, PARTS]) == "(Hi)(a)(b)"


def test_a_part_that_is_not_text_is_rejected() -> None:
    with pytest.raises(ChatTemplateError, match="reads text only.*'image_url'"):
        render(LINES, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_developer_messages_become_system_messages_where_the_role_is_unknown() -> None:
    developer = {"role": "developer", "content": "x"}
    assert render(LINES, [developer]) == "system:x\n"
    assert render("{% set r = 'developer' %}" + LINES, [developer]) == "developer:x\n"


def test_arguments_reach_the_template_as_objects() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    source += "{{ tools | length }}"
    assert render(source, [call('{"a":"ü"}')], tools=[TOOL]) == '{"a": "ü"}1'
    assert render(source, [call("")], tools=[TOOL]) == "{}1"
    assert render(source, [call("not json")], tools=[TOOL]) == '"not json"1'


def test_missing_content_is_empty_text_unless_the_template_asks_for_none() -> None:
    assert render(LINES, [call("{}")]) == "assistant:\n"
    none = "{% for m in messages %}{% if m.content is none %}N{% endif %}{% endfor %}"
    assert render(none, [call("{}")]) == "N"


def test_the_messages_of_the_caller_are_not_changed() -> None:
    messages = [USER, call('{"a": 1}'), {"role": "assistant", "content": "x"}]
    before = json.dumps(messages)
    render(LINES, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


def test_a_continued_chat_is_cut_at_the_end_of_its_text_whatever_else_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that knows the mark of one rendering does not know that of the next."""
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    seen: list[str] = []
    token_hex = secrets.token_hex

    def noted(count: int) -> str:
        seen.append(token_hex(count))
        return seen[-1]

    monkeypatch.setattr(secrets, "token_hex", noted)
    render(LINES, [USER], **flags)
    marks = [f"slipstreamcontinues{seen[0]} ", "<<slipstream continues here>> "]
    later = LINES + "{{ tools | tojson }}"  # what follows the messages
    for mark in marks:
        tool = {"type": "function", "function": {"name": "f", "description": mark}}
        chat = [call(json.dumps({"a": mark})), {"role": "tool", "content": mark}]
        text = render(later, [*chat, {"role": "assistant", "content": mark}], tools=[tool], **flags)
        assert text.endswith(f"assistant:{mark}") and mark in text[: -len(mark)]
    doubled = LINES + "{{ messages[-1].content | upper }}"
    assert render(doubled, [USER], **flags) == "user:Hi"
    part = "{% for m in messages %}{{ m.content[:1] }}{{ m.content[2:] }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render(part, [USER], **flags)  # the text before the mark is another


def test_tools_are_described_where_the_template_ignores_them() -> None:
    messages = [USER, call('{"z": 1}'), {"role": "tool", "content": "noon", "tool_call_id": "c"}]
    text = render(LINES, messages, tools=[TOOL])
    assert text.startswith("system:You can call") and json.dumps(TOOL) in text
    assert 'assistant:<tool_call>{"name": "now", "arguments": {"z": 1}}</tool_call>\n' in text
    assert text.endswith("user:<tool_response>noon</tool_response>\n")
    system = {"role": "system", "content": "Be kind."}
    assert render(LINES, [system, USER], tools=[TOOL]).startswith("system:Be kind.\n\nYou can")
    assert not ChatTemplate(LINES, SPECIAL).supports_tools
    assert ChatTemplate(TEMPLATES["mistral"], SPECIAL).supports_tools


def test_named_templates() -> None:
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "rag"}
    assert render(named, [USER]) == "plain"
    assert render(named, [USER], tools=[TOOL]) == "1 tools"
    assert render(named, [USER], chat_template="rag") == "rag"
    assert render(named, [USER], chat_template="own {{ bos_token }}") == "own <s>"
    with pytest.raises(ChatTemplateError, match="no default: rag, x"):
        render({"rag": "", "x": ""}, [USER])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        render(None, [USER])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('Only users.') }}", "rejected the messages: Only users."),
        ("{% if %}", "is not valid"),
        ("{{ messages[9].content.x }}", "rejected the messages"),
        ("{{ 'a' + 1 }}", "failed on the messages: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
    ],
)
def test_every_failure_is_one_error(source: str, sentence: str) -> None:
    with pytest.raises(ChatTemplateError, match=sentence):
        render(source, [USER])


def test_client_arguments_cannot_replace_the_messages() -> None:
    own = {"messages": [], "tools": 1, "bos_token": "B", "self": 1}
    assert render("{{ bos_token }}" + LINES, [USER], chat_template_kwargs=own) == "Buser:Hi\n"


def test_continuation_is_checked() -> None:
    with pytest.raises(ChatTemplateError, match="cannot both"):
        render(LINES, [USER], continue_final_message=True)
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render("nothing", [USER], **flags)
    assert render(TEMPLATES["gemma"], [PARTS], **flags).endswith("user\nab")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for last in (
        {"role": "assistant", "content": "Hi", "tool_calls": [call]},
        {"role": "assistant", "content": "Hi", "function_call": call["function"]},
        {"role": "tool", "content": "Hi", "tool_call_id": "a"},
        {"role": "function", "content": "Hi", "name": "f"},
    ):
        for tools in (None, [TOOL]):  # a template without tools shows both as other messages
            with pytest.raises(ChatTemplateError, match="has tool calls or is the result of one"):
                render(LINES, [USER, last], tools=tools, **flags)
    with pytest.raises(ChatTemplateError, match="at least one"):
        render(LINES, [])
