"""Renders one chat with the chat template of a request: the child process of `template_children`.

Run as `python -m slipstream.server.chat_templates.template_child`, it reads the chat from standard
input and writes the prompt to standard output. It limits its own memory and time, and imports
little, because it is started for each such request.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec

from .chat_template import ChatTemplate, ChatTemplateError
from .content_guard import ContentGuard

MAX_MEMORY = 1 << 30  # bytes of address space
MAX_CHARACTERS = 4 << 20  # in a prompt
OUT_OF_MEMORY = 3  # exit status


class Answer(msgspec.Struct):
    text: str = ""
    parts: tuple[str, ...] | None = None
    error: str | None = None


def _answer(request: dict[str, Any]) -> Answer:
    template = ChatTemplate(None, request["special_tokens"])
    guard = ContentGuard(request["guarded"])
    try:
        found = template.render_chat(**request["arguments"], guard=guard)
    except ChatTemplateError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return Answer(error=str(error))
    if len(found.text) > MAX_CHARACTERS:
        return Answer(
            error=f"The request's chat template produced more than {MAX_CHARACTERS:,} characters."
        )
    return Answer(found.text, found.parts)


def _limit(seconds: float) -> None:
    try:
        import resource
    except ImportError:  # this system has no such limits; the parent still limits the time
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time, after which SIGPROF kills the process
    os.nice(10)


def main() -> None:
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read())
        _limit(request["max_seconds"])
        sys.stdout.buffer.write(msgspec.json.encode(_answer(request)))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
