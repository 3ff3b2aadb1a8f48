"""Renders chats with the options of templates beside those of `ChatTemplate.render_chat`."""

from __future__ import annotations

import inspect
from typing import Any

from slipstream.server.chat_templates.chat_template import ChatTemplate


def text_of(template: ChatTemplate, messages: list[Any], tools: Any = None, **options: Any) -> str:
    """The text of a chat; options that `render_chat` does not know are the template's."""
    known = inspect.signature(template.render_chat).parameters
    own = {name: options.pop(name) for name in list(options) if name in known}
    given = {**(own.pop("chat_template_kwargs", None) or {}), **options}
    return template.render_chat(messages, tools, **own, chat_template_kwargs=given).text
