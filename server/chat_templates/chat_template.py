"""Renders chats with the model's own Jinja template in a sandbox, as transformers does.

It must not know HTTP or token ids: it converts plain messages to text.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .chat_messages import (
    TemplateTraits,
    TooLargeArguments,
    UnknownRole,
    UnsupportedContent,
    plain_copy,
    prepare_messages,
    with_tools_prompt,
)
from .content_guard import ContentGuard, RenderedChat
from .deepseek import DeepSeekEncoder


class ChatTemplateError(Exception):
    """A chat cannot be rendered; the text is one sentence for the client."""


class ChatTemplate:
    """A model's chat template, or its templates by name ("default", "tool_use", "rag", …).

    Where there is none, the model's `encoder` takes its place."""

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        encoder: DeepSeekEncoder | None = None,
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._sources = named
        self._encoder = None if named else encoder
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, tuple[Template, TemplateTraits]] = {}
        self._lock = threading.Lock()

    @property
    def source(self) -> str | None:
        """The source of the default template, or else of the first; None if there is none."""
        if self._encoder is not None:
            return self._encoder.source
        return self._sources.get("default") or next(iter(self._sources.values()), None)

    @property
    def supports_tools(self) -> bool:
        """Whether any of the templates shows tools to the model."""
        if self._encoder is not None:
            return self._encoder.traits.uses_tools
        return any(self._compile(source)[1].uses_tools for source in self._sources.values())

    @property
    def content_format(self) -> str:
        if self._encoder is not None:
            return self._encoder.traits.content_format
        return self._compile(self.source)[1].content_format if self.source else "string"

    def knows(self, chat_template: str | None) -> bool:
        """Whether a request's `chat_template` is None or a template's name, not a template."""
        return chat_template is None or chat_template in self._sources

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        guard: ContentGuard | None = None,
        response_schema: Any = None,
    ) -> RenderedChat:
        """Render a chat as a prompt. Raises ChatTemplateError.

        `chat_template` is the name of a template or a template. `chat_template_kwargs`, which come
        from the client, are passed to the template, but cannot replace messages, tools or
        documents. An encoder also gets the `response_schema`, the JSON schema of the answer.
        Content parts become text, and tool arguments objects, if the template expects that. Tools
        that the template does not show are described in the system message. A `guard` keeps the
        client's text from being read as special tokens.
        """
        if not messages:
            raise ChatTemplateError("messages must contain at least one message.")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt cannot both be true."
            )
        last = messages[-1]
        has_call = last.get("tool_calls") or last.get("function_call")
        if continue_final_message and (has_call or last.get("role") in ("tool", "function")):
            raise ChatTemplateError(
                "continue_final_message continues a text, but the last message has tool calls or "
                "is the result of one."
            )
        template, traits = self._choose(chat_template, tools)
        try:
            chat = prepare_messages(messages, traits)
        except (UnsupportedContent, UnknownRole, TooLargeArguments) as error:
            raise ChatTemplateError(str(error)) from error
        guard = guard or ContentGuard(())
        more = {**(chat_template_kwargs or {})}
        if template is self._encoder:
            more["response_schema"] = response_schema
        given = [chat, plain_copy(tools), plain_copy(documents), plain_copy(more)]
        (chat, shown_tools, shown_documents, more), stand_ins = guard.hide(given)
        if tools and not traits.uses_tools:
            chat = with_tools_prompt(chat, shown_tools)
        values = {
            **self._special_tokens,
            **more,
            "messages": chat,
            "tools": shown_tools,
            "documents": shown_documents,
            "add_generation_prompt": add_generation_prompt,
        }
        render = _render_continued if continue_final_message else _render
        return guard.reveal(render(template, values), stand_ins)

    def _choose(
        self, wanted: str | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Template | DeepSeekEncoder, TemplateTraits]:
        if wanted is not None:
            return self._compile(self._sources.get(wanted, wanted))
        if self._encoder is not None:
            return self._encoder, self._encoder.traits
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name in self._sources:
            return self._compile(self._sources[name])
        if not self._sources:
            raise ChatTemplateError(
                "The model has no chat template. Start the server with --chat-template FILE, "
                "or use /v1/completions."
            )
        names = ", ".join(sorted(self._sources))
        raise ChatTemplateError(
            f"The model has several chat templates but no default: {names}. Name one in "
            "chat_template."
        )

    def _compile(self, source: str) -> tuple[Template, TemplateTraits]:
        with self._lock:
            if source not in self._compiled:
                self._compiled[source] = _compile(source)
            return self._compiled[source]


def _compile(source: str) -> tuple[Template, TemplateTraits]:
    environment = _environment()
    try:
        return environment.from_string(source), TemplateTraits.of(environment.parse(source))
    except (TemplateError, RecursionError) as error:
        raise ChatTemplateError(f"The chat template is not valid: {error}.") from error


def _render(template: Template | DeepSeekEncoder, values: dict[str, Any]) -> str:
    try:
        return template.render(values)
    except TemplateError as error:
        reason = str(error).rstrip(".")
        raise ChatTemplateError(f"The chat template rejected the messages: {reason}.") from error
    except Exception as error:  # a template is a program, and may fail in any way
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ChatTemplateError(f"The chat template failed on the messages: {reason}.") from error


def _render_continued(template: Template | DeepSeekEncoder, values: dict[str, Any]) -> str:
    """Render the chat up to the end of its last message's text, which the model will continue.

    The text is marked before rendering, and the prompt cut at the mark."""
    last = values["messages"][-1]
    content = last.get("content")
    if isinstance(content, list):
        part = next((p for p in reversed(content) if isinstance(p.get("text"), str)), None)
    else:
        part = None
    text = part["text"] if part else content
    if not isinstance(text, str):
        raise ChatTemplateError("continue_final_message requires text in the last message.")
    holder, key = (part, "text") if part else (last, "content")
    # No other part of the chat has this word, and templates that write JSON do not escape it. Its
    # last space shows whether the template strips messages.
    mark = f"slipstreamcontinues{secrets.token_hex(8)}"
    holder[key] = f"{text}{mark} "
    rendered = _render(template, values)
    holder[key] = text
    cut = rendered.rfind(mark)
    if cut < 0 or not rendered[:cut].rstrip().endswith(text.strip()):
        raise ChatTemplateError(
            "The last message cannot be continued, because the chat template does not show it."
        )
    kept = rendered.startswith(f"{mark} ", cut)
    return rendered[:cut] if kept else rendered[:cut].rstrip()


# --- the sandbox ------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """Ignores the tag `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A namespace that rejects names with a leading underscore, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _dict,
        "namespace": _SafeNamespace,
    }
    environment.globals.update(functions)
    return environment
