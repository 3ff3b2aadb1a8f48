"""Drafter swaps of an engine client: sends one action at a time and waits for its answer.

A trial belongs to one worker. When that worker ends, the trial ends with it. The next worker loads
the drafter kept last, the configured one, or none: the files of a kept head may be missing, and
serving without it is better than not serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from ...configs.schema import SpeculativeConfig
from ...runner.messages import ChangeSpeculator, SpeculatorChanged
from ..request_stream import EngineDead, SpeculatorRefused

log = logging.getLogger("slipstream.speculator")


class DrafterChanges:
    """The state of drafter swaps. Call its methods only from the event loop's thread."""

    def __init__(
        self,
        post: Callable[[ChangeSpeculator], None],  # raises EngineDead unless ready
        keep: Callable[[str], None],  # called with each drafter that is kept
    ) -> None:
        self._post, self._keep = post, keep
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[SpeculatorChanged] | None = None
        self._loaded = ""  # the loaded drafter, until "keep" or "revert"
        self._is_lost = False  # whether the worker that loaded it has ended
        self._pending = ""  # the action that awaits its answer, or ""

    @property
    def is_owed(self) -> bool:
        """Whether the worker owes an answer that it gives within a step.

        A load takes longer; the worker bounds its time itself.
        """
        return self._pending not in ("", "load")

    async def perform(self, action: str, model: str = "") -> None:
        """See `EngineClient.change_speculator`.

        The answer is awaited even if the caller is cancelled, so that it cannot be mistaken for the
        answer to the next action.
        """
        action_done = asyncio.ensure_future(self._perform(action, model))
        action_done.add_done_callback(_note_failure)
        await asyncio.shield(action_done)

    def answer(self, changed: SpeculatorChanged) -> None:
        """Deliver the worker's answer to the action that was sent."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(changed)

    def fail(self, error: EngineDead) -> None:
        self._is_lost = bool(self._loaded)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    async def _perform(self, action: str, model: str) -> None:
        async with self._turn:
            if action == "load":
                self._loaded, self._is_lost = "", False
            elif self._is_lost:
                raise EngineDead("the engine restarted during the trial of a drafter")
            self._post(ChangeSpeculator(action, model))
            self._answer = asyncio.get_running_loop().create_future()
            self._pending = action
            try:
                answer = await self._answer
            finally:
                self._pending = ""
            if answer.error is not None:
                raise SpeculatorRefused(answer.error)
            if action == "load":
                self._loaded = model
            elif action != "try":
                if action == "keep":
                    self._keep(self._loaded)
                self._loaded = ""


def _note_failure(action_done: asyncio.Task[None]) -> None:
    """Log an error, in case the caller was cancelled and does not receive it."""
    if not action_done.cancelled() and (error := action_done.exception()) is not None:
        log.info("the drafter change failed: %s", error)


class NextDrafter:
    """The drafter for the next start of the worker."""

    def __init__(self, configured: SpeculativeConfig) -> None:
        self.current = self._configured = configured
        self.fallback: str | None = None  # why `current` replaces another drafter

    def keep(self, model: str) -> None:
        self.current, self.fallback = replace(self.current, model=model), None

    def fall_back(self, reason: str) -> bool:
        """Replace a drafter that could not be loaded; returns False if drafting is off already."""
        lost, configured = self.current, self._configured
        if lost.method == "off":
            return False
        if lost.model != configured.model:
            self.current, instead = (
                configured,
                f"using the configured one, {configured.model}",
            )
        else:
            self.current, instead = SpeculativeConfig(), "serving without a drafter"
        named = lost.model or lost.method
        self.fallback = f"cannot load the drafter {named} ({reason.rstrip('.')}): {instead}"
        log.warning(self.fallback)
        return True
