"""Serves requests to exchange a running drafter's weights, between two steps and without a stop.

A checkpoint is read in a thread while steps run on. Its weights are exchanged for the running ones,
which are kept until it is settled which stay. Imports no torch; see `draft_exchange`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import why_unreadable
from ..messages import ChangeSpeculator, SpeculatorChanged, StepOutputs

if TYPE_CHECKING:
    from ..drafters.exchange import Exchange
    from ..scheduling.draft_planner import DraftPlanner

_POLL_SECONDS = 0.02  # how long an otherwise idle step waits for a checkpoint
_LOAD_SECONDS = 300.0  # a checkpoint that is not loaded by then, its download included, is given up
_END_SECONDS = 2.0  # at the worker's end, for a load that goes on
_METHODS = ("eagle", "eagle3")


class ExchangesDrafter(Protocol):
    """What a model runner does for it."""

    @property
    def speculator(self) -> Any:
        """The drafter; None without one."""

    def exchange_drafter(self, swap: Callable[[], None]) -> None:
        """Run `swap`, which gives the drafter other weights, between two steps."""


class DraftSwap:
    """Serves `ChangeSpeculator` messages; the engine polls it once a step."""

    def __init__(
        self,
        runner: ExchangesDrafter,
        drafts: DraftPlanner | None,
        news: Callable[[], StepOutputs],
        forget_kv: Callable[[], None],
    ) -> None:
        self._runner = runner  # the exchange runs in the order of its steps
        self._drafts = drafts  # what chooses K must learn anew
        self._news = news  # an answer comes with the scheduler's gauges
        self._forget_kv = forget_kv  # the prefix cache's draft KV is the other head's
        self._loading: Future[Exchange | str] | None = None
        self._gives_up_at = 0.0  # time.monotonic()
        self._exchange: Exchange | None = None  # holds the loaded head; while it is tried, the old
        self._is_tried = False
        self._asked: list[str] = []  # actions that wait for a moment between two steps
        self._answers: list[SpeculatorChanged] = []

    @property
    def is_busy(self) -> bool:
        """`poll` has something to do or to wait for."""
        return self._loading is not None or bool(self._asked or self._answers)

    def start(self, message: ChangeSpeculator) -> None:
        """Begin what the message asks for; `poll` does the rest and gives the answer."""
        if message.action == "load":
            self._load(message.model)
        else:
            self._asked.append(message.action)

    def poll(self, is_idle: bool, is_between: bool) -> list[StepOutputs]:
        """The answers so far; waits a little for one if nothing else is to be done.

        `is_between`: no step is half launched, whose drafts would change under it.
        """
        if self._loading is not None:
            if is_idle:
                wait([self._loading], _POLL_SECONDS)
            if self._loading.done():
                self._take(self._loading.result())
                self._loading = None
            elif time.monotonic() > self._gives_up_at:
                self._loading = None  # what it may still load goes with its thread
                self._answer(f"the drafter was not loaded in {_LOAD_SECONDS:g} s and is given up")
        if is_between and self._loading is None:
            for action in self._asked:
                self._answer(self._do(action))
            self._asked.clear()
        answers, self._answers = self._answers, []
        return [self._told(answer) for answer in answers]

    def shutdown(self) -> None:
        """Let a load end, if it does so soon: the interpreter ends under it otherwise."""
        if self._loading is not None:
            wait([self._loading], _END_SECONDS)

    def _load(self, model: str) -> None:
        speculator = self._runner.speculator
        config = getattr(speculator, "config", None)  # only drafters with a model keep theirs
        if config is None or config.method not in _METHODS:
            self._answer(f"only drafters of the methods {', '.join(_METHODS)} can be exchanged")
        elif self._loading is not None or self._exchange is not None:
            self._answer("another drafter is being tried")
        else:
            self._loading = _in_thread(_load, speculator, model)
            self._gives_up_at = time.monotonic() + _LOAD_SECONDS

    def _take(self, loaded: Exchange | str) -> None:
        if isinstance(loaded, str):
            self._answer(loaded)
        else:
            self._exchange = loaded
            self._start_anew()  # both are measured from the same start, and though one was stopped
            self._answer(None)

    def _do(self, action: str) -> str | None:
        """Try, keep or revert; a sentence if there is nothing to do it with."""
        if action == "try":
            if self._exchange is None or self._is_tried:
                return "no drafter is loaded that could be tried"
            self._swap(self._exchange)
            self._is_tried = True
            return None
        if self._exchange is None:
            return "no drafter is being tried"
        if action == "revert" and self._is_tried:
            self._swap(self._exchange)
        self._exchange, self._is_tried = None, False
        return None

    def _swap(self, exchange: Exchange) -> None:
        self._runner.exchange_drafter(exchange.swap)
        self._forget_kv()
        self._start_anew()

    def _start_anew(self) -> None:
        if self._drafts is not None:
            self._drafts.new_drafter()

    def _answer(self, error: str | None) -> None:
        self._answers.append(SpeculatorChanged(error))

    def _told(self, answer: SpeculatorChanged) -> StepOutputs:
        outputs = self._news()
        outputs.speculator = answer
        if self._drafts is not None:
            self._drafts.tell_health(outputs.stats)
        return outputs


def _in_thread(load: Callable[[Any, str], Exchange | str], *args: Any) -> Future[Exchange | str]:
    """Its result, to come. Unlike an executor's, the thread may hang: it delays no end, and the
    next load has another."""
    future: Future[Exchange | str] = Future()
    run = threading.Thread(
        target=lambda: future.set_result(load(*args)), name="load-drafter", daemon=True
    )
    run.start()
    return future


def _load(speculator: Any, model: str) -> Exchange | str:
    """The loaded head, or a sentence that says why there is none.

    No exception leaves the loader's thread: its frames hold the refused head, whose memory the next
    one needs.
    """
    try:
        from ..drafters.exchange import load_other

        return load_other(speculator, model)
    except Exception as error:  # whatever a checkpoint may hold: it ends no worker
        sentence = why_unreadable(error)
        _free_frames(error)
        return sentence


def _free_frames(error: BaseException | None) -> None:
    """Let go of what they hold at once; one that holds the error itself waits for the collector."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
