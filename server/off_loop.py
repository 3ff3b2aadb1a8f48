"""Runs long work in threads of its own, off the event loop.

There are few of them, so that long work delays other long work and nothing else. Python's global
lock remains: what holds it for long (one call into C) must be bounded by its caller.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_BODY = 16384  # bytes of a request; what is prepared for larger ones leaves the event loop
_NUM_THREADS = 2
_SWITCH_SECONDS = 0.001  # how long the event loop waits for the lock at each of its steps

_LOGPROBS_BYTES = 64  # what a token's log probabilities count as
_PACKED_BYTES = 4  # what a byte of packed ones counts as

Result = TypeVar("Result")


def _begin() -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)


_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="long", initializer=_begin)


async def off_loop(function: Callable[..., Result], *arguments: object) -> Result:
    """What the function returns, computed in a thread."""
    context = contextvars.copy_context()  # the log's request id
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, context.run, function, *arguments)


def logprobs_size(packed: Sequence[bytes] | None, *lists: Sequence[object]) -> int:
    """The size for `by_size` of a reply with the log probabilities of a prompt and of tokens."""
    return _PACKED_BYTES * sum(map(len, packed or ())) + _LOGPROBS_BYTES * sum(map(len, lists))


async def by_size(size: int, function: Callable[..., Result], *arguments: object) -> Result:
    """The same for a request of `size` bytes, at once if it is short."""
    if size <= LONG_BODY:
        return function(*arguments)
    return await off_loop(function, *arguments)
