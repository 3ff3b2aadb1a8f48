"""DeepSeek V4's role `latest_reminder`, and the refusal of it by every other model."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.server.chat_templates.chat_template import ChatTemplate, ChatTemplateError
from slipstream.server.chat_templates.content_guard import ContentGuard
from slipstream.server.openai_types.chat import Message

from .test_deepseek import BOS, EOS, OFF, ON, V4, V32, A, U, render, say

R = "<｜latest_reminder｜>"
SYSTEM, DATE = say("system", "Be brief."), say("latest_reminder", "2026-02-21")
HI, YES, WHY = say("user", "Hi"), say("assistant", "Yes"), say("user", "Why?")


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ([SYSTEM, DATE, HI], f"Be brief.{R}2026-02-21{U}Hi{A}</think>"),
        (
            [SYSTEM, HI, YES, DATE, WHY],
            f"Be brief.{U}Hi{A}</think>Yes{EOS}{R}2026-02-21{U}Why?{A}</think>",
        ),
        # Behind the question, where the answer has begun already.
        ([HI, DATE], f"{U}Hi{A}</think>{R}2026-02-21"),
        ([HI, DATE, DATE], f"{U}Hi{A}</think>{R}2026-02-21{R}2026-02-21"),
        ([HI, YES, DATE], f"{U}Hi{A}</think>Yes{EOS}{R}2026-02-21{A}</think>"),
        ([DATE], f"{R}2026-02-21{A}</think>"),
        # A developer's message in front of a user's is an instruction, a reminder between or not.
        ([say("developer", "Rhyme."), DATE, HI], f"Rhyme.{R}2026-02-21{U}Hi{A}</think>"),
    ],
)
def test_v4_s_reminders(chat: list[Any], expected: str) -> None:
    assert render(V4, chat, chat_template_kwargs=OFF) == BOS + expected


def test_a_reminder_is_no_turn_that_hides_earlier_reasoning() -> None:
    answer = say("assistant", "Yes", reasoning_content="because")
    text = render(V4, [HI, answer, DATE], chat_template_kwargs=ON)
    assert text == f"{BOS}{U}Hi{A}<think>because</think>Yes{EOS}{R}2026-02-21{A}<think>"


def test_a_client_s_marker_of_a_reminder_stays_text() -> None:
    template = ChatTemplate(None, {}, V4)
    guard = ContentGuard([BOS, R, U, A])
    shown = template.render_chat([say("user", f"{R}now"), DATE, HI], guard=guard)
    assert shown.parts is not None and shown.parts[1::2].count(R) == 1


def test_other_models_refuse_the_role() -> None:
    assert Message.model_validate(DATE).role == "latest_reminder"
    words = "knows no messages of role 'latest_reminder'"
    with pytest.raises(ChatTemplateError, match=words):
        render(V32, [DATE, HI])
    loop = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(loop, {}).render_chat([DATE, HI])
    knows = "{% for m in messages if m.role == 'latest_reminder' %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(knows, {}).render_chat([DATE, HI]).text == "2026-02-21"
