"""Workers whose engines share their experts: they start together, and if one ends, all do.

Every engine keeps its own client, which starts and restarts its worker. This lets them agree.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile

from ...runner.process import EngineOrders

_SUBJECT = "the worker "  # with which most sentences about a worker's end begin


class GroupEnded(Exception):
    """Another worker ended before this one was started. The message is the sentence for all."""


class _Life:
    """The time of one set of workers."""

    def __init__(self, on_hosts: bool) -> None:
        # mode 0700; on several hosts they meet at a port
        self.folder = "" if on_hosts else tempfile.mkdtemp(prefix="slipstream-engines-")
        self.rendezvous = ""  # of several hosts, once the first engine listens there
        self.reason: str | None = None  # why it ended
        self.ended = asyncio.Event()
        self.told = asyncio.Event()  # it has ended, or its rendezvous is known


class WorkerGroup:
    """The workers of `size` engines. Its methods are called on the event loop only."""

    def __init__(self, size: int, on_hosts: bool = False) -> None:
        """`on_hosts`: the engines may run on several hosts."""
        self._size, self._on_hosts = size, on_hosts
        self._waiting: dict[int, asyncio.Future[_Life]] = {}
        self._lives: dict[int, _Life] = {}  # by engine

    async def join(self, engine: int) -> EngineOrders:
        """Wait until all engines start a worker; returns the place of this one.

        On several hosts the worker of the first engine chooses where all meet, and the others wait
        for `met`. Raises OSError, and GroupEnded if another worker ends before that.
        """
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
        if self._on_hosts and engine != 0:
            await life.told.wait()
            if life.reason is not None:
                raise GroupEnded(life.reason)
        return EngineOrders(engine, self._size, life.folder, life.rendezvous)

    def met(self, rendezvous: str) -> None:
        """Note where the worker of the first engine listens for the ranks of all."""
        life = self._lives[0]
        life.rendezvous = rendezvous
        life.told.set()

    def _begin(self) -> None:
        self.close()
        waiting, self._waiting = self._waiting, {}
        try:
            life = _Life(self._on_hosts)
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
            life.told.set()
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
            if life.folder:
                shutil.rmtree(life.folder, ignore_errors=True)
