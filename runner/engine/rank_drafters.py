"""Swaps a drafter on all ranks of a group: each loads the checkpoint, and swaps at the same step.

The first rank's `DraftSwap` decides what happens and when. It tells the other ranks by commands,
which each runs in order with its steps, so that no step has the old weights on one rank and the
new ones on another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ..parallel.commands import DrafterLoaded, DropDrafter, LoadDrafter, SwapDrafter
from ..parallel.group import RankGroup
from .swap import load_drafter

if TYPE_CHECKING:
    from ..drafters.exchange import Exchange

_WAIT_SECONDS = 300.0  # for the other ranks
_POLL_SECONDS = 0.05


class DraftersElsewhere:
    """The first rank's side."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._lock = group, threading.Lock()
        self._number = 0  # of the newest load
        self._faults: dict[int, str] = {}  # rank -> why it could not load; "": it has loaded
        group.on_drafter = self._note

    def load(self, model: str) -> Callable[[], str | None]:
        """See `ModelRunner.load_elsewhere`; any thread may call what it returns."""
        with self._lock:
            self._number += 1
            self._faults.clear()
            number = self._number
        self._group.send(LoadDrafter(number, model))
        return partial(self._wait, number)

    def swap(self) -> None:
        self._group.send(SwapDrafter())

    def drop(self) -> None:
        """Let the other ranks forget what they have loaded or still load."""
        with self._lock:
            self._number += 1
        self._group.send(DropDrafter())

    def _note(self, answer: DrafterLoaded) -> None:
        with self._lock:
            if answer.number == self._number:
                self._faults[answer.rank] = answer.fault

    def _wait(self, number: int) -> str | None:
        gives_up_at = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < gives_up_at:
            self._group.check()
            with self._lock:
                if self._number != number:
                    return "loading the drafter was cancelled"
                if len(self._faults) == self._group.size - 1:
                    faults = [f"rank {rank}: {why}" for rank, why in self._faults.items() if why]
                    return faults[0] if faults else None
            time.sleep(_POLL_SECONDS)
        return "the other ranks did not load the drafter in time"


class RankDrafter:
    """Another rank's side."""

    def __init__(self, speculator: Any, exchange: Callable[[Callable[[], None]], None]) -> None:
        """`exchange`: see `ModelRunner.exchange_drafter`."""
        self._speculator, self._run_between = speculator, exchange
        self._loading: tuple[int, Future[Exchange | str]] | None = None
        self._loaded: Exchange | None = None

    @property
    def is_loading(self) -> bool:
        """Whether `finished` may return something soon."""
        return self._loading is not None

    def load(self, number: int, model: str) -> None:
        self._loading = number, load_drafter(self._speculator, model)

    def finished(self) -> tuple[int, str] | None:
        """The number of the load that has ended since the last call, and why it failed ("": it did
        not)."""
        if self._loading is None or not self._loading[1].done():
            return None
        (number, future), self._loading = self._loading, None
        loaded = future.result()
        if isinstance(loaded, str):
            return number, loaded
        self._loaded = loaded
        return number, ""

    def swap(self) -> None:
        assert self._loaded is not None, "a drafter must be loaded before it is swapped in"
        self._run_between(self._loaded.swap)

    def drop(self) -> None:
        self._loading = self._loaded = None
