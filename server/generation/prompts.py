"""Turns the body of a chat or completion into prompts of token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..chat_templates.chat_template import ChatTemplateError
from ..chat_templates.content_guard import ContentGuard, RenderedChat
from ..errors import InvalidRequest
from ..off_loop import by_size
from ..openai_types.chat import ChatCompletionRequest
from ..openai_types.completions import CompletionRequest
from ..output.sampling import check_token_ids
from .prompt_ids import Fit, tokenize, tokenize_chat
from .services import Services

_MAX_ECHO = 1000  # characters of a template's error message, which may contain the messages
# Names that a client's chat_template_kwargs must not set.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"}

_THINKING = ("thinking", "enable_thinking")  # what templates call the switch of reasoning


class Prompts(NamedTuple):
    """The prompts of a request, as token ids."""

    ids: list[list[int]]
    text: str = ""  # a chat as rendered by the template; empty for completions


async def chat_prompt(
    services: Services,
    body: ChatCompletionRequest,
    tools: list[dict[str, Any]] | None,
    fit: Fit,
    end: Callable[[str], str] = lambda rendered: "",
) -> Prompts:
    """The prompt of a chat; `tools` are passed to the template.

    `end` returns the text to append to a rendered chat. Raises InvalidRequest if the template
    rejects the chat, ContextLengthExceeded.
    """
    rendered = await _render(services, body, tools)
    guard = services.guard or ContentGuard(())
    rendered = guard.append(rendered, end(rendered.text))
    ids = await tokenize_chat(services, rendered, bool(body.add_special_tokens), fit)
    return Prompts([ids], rendered.text)


async def completion_prompts(services: Services, body: CompletionRequest, fit: Fit) -> Prompts:
    """The prompts of a completion.

    Raises InvalidRequest for ids outside the vocabulary, ContextLengthExceeded.
    """
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in body.prompts if isinstance(prompt, list)]
    if texts:
        ids = await tokenize(services, texts, body.add_special_tokens is not False, fit)

    def check() -> None:
        for prompt in ids:
            check_token_ids(prompt, services.engine.ready.vocab_size, "prompt")

    await by_size(body.num_bytes, check)
    return Prompts(ids)


async def _render(
    services: Services, body: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> RenderedChat:
    """Render a chat. A template's error becomes an InvalidRequest.

    A long chat is rendered off the event loop, and a template from the request in a child process.
    """
    try:
        if services.template.knows(body.chat_template):
            return await by_size(body.num_bytes, _rendered, services, body, tools)
        arguments = await by_size(body.num_bytes, _arguments, services, body, tools)
        return await services.template_children.render(arguments)
    except ChatTemplateError as error:
        reason = str(error)
        if len(reason) > _MAX_ECHO:
            reason = reason[:_MAX_ECHO] + "…"
        raise InvalidRequest(reason, "messages", "invalid_value") from None


def _arguments(
    services: Services, body: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The checked arguments of the template."""
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
    given = kwargs.keys() & set(_THINKING)
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled") and not given:
        kwargs |= dict.fromkeys(_THINKING, body.thinking.type == "enabled")
    if body.chat_template is not None and not services.config.server.trust_request_chat_template:
        raise InvalidRequest(
            "Chat templates in requests are disabled; start the server with "
            "--trust-request-chat-template to enable them.",
            "chat_template",
            "invalid_value",
        )
    return {
        "messages": [message.model_dump(exclude_none=True) for message in body.messages],
        "tools": tools,
        "documents": body.documents,
        "add_generation_prompt": not continued and body.add_generation_prompt is not False,
        "continue_final_message": continued,
        "chat_template": body.chat_template,
        "chat_template_kwargs": kwargs,
        "response_schema": _response_schema(body),
    }


def _response_schema(body: ChatCompletionRequest) -> Any:
    """The JSON schema of the answer that the request demands, or None; forced calls have none."""
    if body.tool_choice not in (None, "none", "auto"):
        return None
    wanted = body.response_format
    named = wanted.json_schema if wanted is not None and wanted.type == "json_schema" else None
    return None if named is None else named.schema_


def _rendered(
    services: Services, body: ChatCompletionRequest, tools: list[dict[str, Any]] | None
) -> RenderedChat:
    return services.template.render_chat(**_arguments(services, body, tools), guard=services.guard)
