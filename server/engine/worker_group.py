"""Workers whose engines share their experts: they start together, and if one ends, all do.

Every engine keeps its own client, which starts and restarts its worker. This lets them agree.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile

from ...runner.process import EngineOrders

_SUBJECT = "the worker "  # with which most sentences about a worker's end begin


class _Life:
    """The time of one set of workers."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="slipstream-engines-")  # mode 0700
        self.reason: str | None = None  # why it ended
        self.ended = asyncio.Event()


class WorkerGroup:
    """The workers of `size` engines. Its methods are called on the event loop only."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[int, asyncio.Future[_Life]] = {}
        self._lives: dict[int, _Life] = {}  # by engine

    async def join(self, engine: int) -> EngineOrders:
        """Wait until all engines start a worker; returns the place of this one. Raises OSError."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[engine] = place
        try:
            if len(self._waiting) == self._size:
                self._begin()
            life = await place
        finally:
            if self._waiting.get(engine) is place:
                del self._waiting[engine]
        self._lives[engine] = life
        return EngineOrders(engine, self._size, life.folder)

    def _begin(self) -> None:
        self.close()
        waiting, self._waiting = self._waiting, {}
        try:
            life = _Life()
        except OSError as error:
            for place in waiting.values():
                place.set_exception(OSError(error.errno, str(error)))
            return
        for place in waiting.values():
            place.set_result(life)

    def end(self, engine: int, reason: str, at_start: bool = False) -> str:
        """Note that a worker has ended, and why; returns the sentence for all engines, which is
        about the first that ended.

        What ends a worker `at_start` is rarely about this engine alone, so the sentence does not
        name it.
        """
        life = self._lives[engine]
        if life.reason is None:
            about = f"data-parallel rank {engine} "
            if reason.startswith(_SUBJECT):
                life.reason = about + reason.removeprefix(_SUBJECT)
            else:
                life.reason = reason if at_start else f"{about}ended: {reason}"
            life.ended.set()
        return life.reason

    async def ended(self, engine: int) -> str:
        """Return a sentence when another worker has ended, so that this one must end too."""
        life = self._lives[engine]
        await life.ended.wait()
        assert life.reason is not None
        return life.reason

    def close(self) -> None:
        """Remove the folder of workers that have ended."""
        for life in self._lives.values():
            shutil.rmtree(life.folder, ignore_errors=True)
