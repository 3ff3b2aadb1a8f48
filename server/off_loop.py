"""Runs work in threads, off the event loop: long work in a small pool.

The pool has few threads, so that long work delays only other long work. Threads still share
Python's global lock: the caller must bound the length of single calls into C, which hold it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import ParamSpec, TypeVar

LONG_BODY = 16384  # bytes; work on larger requests runs in the thread pool
_NUM_THREADS = 2
_SWITCH_SECONDS = 0.001  # after which a thread must hand the global lock to the event loop

_LOGPROBS_BYTES = 64  # assumed size of a token's log probabilities
_PACKED_BYTES = 4  # assumed size of one byte of packed log probabilities

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _begin() -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)


_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="long", initializer=_begin)


async def off_loop(function: Callable[..., Result], *arguments: object) -> Result:
    """Call the function in the thread pool and return its result."""
    context = contextvars.copy_context()  # the log's request id
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, context.run, function, *arguments)


def in_daemon_thread(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> asyncio.Future[Result]:
    """Call a function in a daemon thread, which unlike an executor's does not delay the exit."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()  # a later cancellation does not affect the thread
    Thread(target=run, name=function.__name__, daemon=True).start()
    return asyncio.wrap_future(outcome)


def logprobs_size(packed: Sequence[bytes] | None, *lists: Sequence[object]) -> int:
    """The size, as `by_size` takes it, of a reply with these log probabilities.

    `packed` are those of a prompt; each of `lists` has an entry per generated token.
    """
    return _PACKED_BYTES * sum(map(len, packed or ())) + _LOGPROBS_BYTES * sum(map(len, lists))


async def by_size(size: int, function: Callable[..., Result], *arguments: object) -> Result:
    """Call the function: directly if `size` is at most LONG_BODY bytes, else with `off_loop`."""
    if size <= LONG_BODY:
        return function(*arguments)
    return await off_loop(function, *arguments)
