"""Owns what is asked of the worker about another drafter: one question at a time, each answered.

A trial belongs to one worker: when that ends, what it tried is gone, and the next starts without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...runner.messages import ChangeSpeculator, SpeculatorChanged
from ..request_stream import EngineDead, SpeculatorRefused

log = logging.getLogger("slipstream.engine")


class DrafterChanges:
    """The questions of an engine client; all methods are for the event loop's thread."""

    def __init__(
        self,
        post: Callable[[ChangeSpeculator], None],  # raises EngineDead if no worker serves
        keep: Callable[[str], None],  # called with the drafter that a worker has kept
    ) -> None:
        self._post, self._keep = post, keep
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[SpeculatorChanged] | None = None
        self._loaded = ""  # the drafter of the last "load", until it is settled
        self._is_lost = False  # the worker that had it has ended
        self._asked = ""  # the action whose answer is waited for

    @property
    def is_owed(self) -> bool:
        """The worker owes an answer that takes no longer than a step; a load takes its time, which
        the worker bounds."""
        return self._asked not in ("", "load")

    async def ask(self, action: str, model: str = "") -> None:
        """See `EngineClient.change_speculator`. The answer is waited for though the caller leaves:
        it must not be taken for that to the next question."""
        asked = asyncio.ensure_future(self._ask(action, model))
        asked.add_done_callback(_note_failure)
        await asyncio.shield(asked)

    def answer(self, changed: SpeculatorChanged) -> None:
        """The worker's answer to the question that was posted."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(changed)

    def fail(self, error: EngineDead) -> None:
        """The worker has ended."""
        self._is_lost = bool(self._loaded)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    async def _ask(self, action: str, model: str) -> None:
        async with self._turn:
            if action == "load":
                self._loaded, self._is_lost = "", False
            elif self._is_lost:
                raise EngineDead("the engine restarted during the trial of a drafter")
            self._post(ChangeSpeculator(action, model))
            self._answer = asyncio.get_running_loop().create_future()
            self._asked = action
            try:
                answer = await self._answer
            finally:
                self._asked = ""
            if answer.error is not None:
                raise SpeculatorRefused(answer.error)
            if action == "load":
                self._loaded = model
            elif action != "try":
                if action == "keep":
                    self._keep(self._loaded)
                self._loaded = ""


def _note_failure(asked: asyncio.Task[None]) -> None:
    """The caller gets it too, unless it has left."""
    if not asked.cancelled() and (error := asked.exception()) is not None:
        log.info("the drafter change failed: %s", error)
