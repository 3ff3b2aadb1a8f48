"""Renders chats with the chat templates of requests, each in a child process with limits.

A template is a program. The sandbox denies it access to the machine, but does not limit its time
and memory. Few children run at once, so that such requests wait for each other without delaying
others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from .chat_template import ChatTemplateError
from .content_guard import RenderedChat
from .template_child import MAX_MEMORY, OUT_OF_MEMORY, Answer

MAX_SECONDS = 5.0  # CPU time of a child
_PATIENCE = 6.0  # elapsed time may be this many times the CPU time, as on a busy machine
_NUM_CHILDREN = 2  # that run at once


class TemplateChildren:
    """Renders chats, each in a child process with limits on its time and memory."""

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        guarded: frozenset[str] = frozenset(),
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """`guarded` are the special tokens that the client's text must not become; the children
        may use `max_seconds` of CPU time each."""
        self._common = {
            "special_tokens": dict(special_tokens),
            "guarded": sorted(guarded),
            "max_seconds": max_seconds,
        }
        self._max_seconds = max_seconds
        self._threads = ThreadPoolExecutor(_NUM_CHILDREN, thread_name_prefix="template")

    async def render(self, arguments: Mapping[str, Any]) -> RenderedChat:
        """Call `ChatTemplate.render_chat` with these arguments in a child process.

        Raises ChatTemplateError, also if the child exceeds its limits."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._render, arguments)

    def _render(self, arguments: Mapping[str, Any]) -> RenderedChat:
        data = msgspec.json.encode({**self._common, "arguments": arguments})
        package = str(Path(__file__).parents[3])  # the folder that contains `slipstream`
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        try:
            child = subprocess.run(
                [sys.executable, "-P", "-m", f"{__package__}.template_child"],
                input=data,
                capture_output=True,
                env={**os.environ, "PYTHONPATH": path},
                timeout=_PATIENCE * MAX_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise self._too_slow() from None
        except OSError as error:
            raise ChatTemplateError(
                f"The request's chat template could not be started: {error}."
            ) from None
        if child.returncode == -signal.SIGPROF:
            raise self._too_slow()
        if child.returncode == OUT_OF_MEMORY:
            raise ChatTemplateError(
                f"The request's chat template needs more than {MAX_MEMORY >> 20} MiB of memory."
            )
        if child.returncode:
            raise ChatTemplateError(
                f"The request's chat template crashed its process (status {child.returncode})."
            )
        found = msgspec.json.decode(child.stdout, type=Answer)
        if found.error is not None:
            raise ChatTemplateError(found.error)
        return RenderedChat(found.text, found.parts)

    def _too_slow(self) -> ChatTemplateError:
        return ChatTemplateError(
            f"The request's chat template took longer than {self._max_seconds:g} s."
        )
