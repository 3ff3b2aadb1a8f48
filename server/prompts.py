"""Renders a chat request's messages with the model's template, whatever of it the client chose."""

from __future__ import annotations

from typing import Any

from .chat_template import ChatTemplateError
from .content_guard import RenderedChat
from .errors import InvalidRequest
from .openai_types.chat import ChatCompletionRequest
from .services import Services

# What a client's chat_template_kwargs must not replace.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"}


def render_chat(
    services: Services, body: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> RenderedChat:
    """The prompt; whatever the template objects to is the client's 400."""
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            "continue_final_message",
            "invalid_value",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if reserved := _RESERVED & kwargs.keys():
        raise InvalidRequest(
            f"'chat_template_kwargs' cannot set {sorted(reserved)[0]!r}.",
            "chat_template_kwargs",
            "invalid_value",
        )
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    if body.chat_template is not None and not services.config.server.trust_request_chat_template:
        raise InvalidRequest(
            "The server takes no chat templates from clients; it would with "
            "--trust-request-chat-template.",
            "chat_template",
            "invalid_value",
        )
    try:
        return services.template.render_chat(
            [message.model_dump(exclude_none=True) for message in body.messages],
            tools,
            body.documents,
            not continued and body.add_generation_prompt is not False,
            continued,
            body.chat_template,
            kwargs,
            services.guard,
        )
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), "messages", "invalid_value") from None
