"""Swaps a running drafter's weights between two steps, without stopping the worker.

A thread reads the new checkpoint while steps continue. The weights are then swapped, and the old
ones are kept until "keep" or "revert" arrives. Imports no torch; see `drafters.exchange`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from ..errors import why_unreadable
from ..messages import ChangeSpeculator, SpeculatorChanged, StepOutputs

if TYPE_CHECKING:
    from ..drafters.exchange import Exchange
    from ..scheduling.draft_planner import DraftPlanner
    from ..step.model_runner import ModelRunner

_POLL_SECONDS = 0.02  # how long an otherwise idle step waits for a checkpoint
_LOAD_SECONDS = 300.0  # time limit for loading a checkpoint, its download included
_END_SECONDS = 2.0  # at shutdown, how long to wait for a load that has not finished
_METHODS = ("eagle", "eagle3")


class DraftSwap:
    """Serves `ChangeSpeculator` messages; the engine polls it once per step."""

    def __init__(
        self,
        runner: ModelRunner,
        drafts: DraftPlanner | None,
        news: Callable[[], StepOutputs],
        forget_kv: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._drafts = drafts  # forgets its measurements after a swap
        self._news = news  # an answer is sent with the scheduler's gauges
        self._forget_kv = forget_kv  # empties the prefix cache: its draft KV is the old head's
        self._loading: Future[Exchange | str] | None = None
        self._gives_up_at = 0.0  # time.monotonic()
        # The weights that are not in use: the loaded head's, or during a trial the old head's.
        self._exchange: Exchange | None = None
        self._is_tried = False
        self._asked: list[str] = []  # actions to do between two steps
        self._answers: list[SpeculatorChanged] = []

    @property
    def is_busy(self) -> bool:
        """True if `poll` has something to do or to wait for."""
        return self._loading is not None or bool(self._asked or self._answers)

    def start(self, message: ChangeSpeculator) -> None:
        """Begin the action of a message; `poll` finishes it and returns the answer."""
        if message.action == "load":
            self._load(message.model)
        else:
            self._asked.append(message.action)

    def poll(self, is_idle: bool, is_between: bool) -> list[StepOutputs]:
        """Return the answers that are ready.

        `is_idle`: the engine has nothing else to do, so a short wait is allowed. `is_between`: no
        step is half launched, so the drafter may be swapped.
        """
        if self._loading is not None:
            if is_idle:
                wait([self._loading], _POLL_SECONDS)
            if self._loading.done():
                self._take(self._loading.result())
                self._loading = None
            elif time.monotonic() > self._gives_up_at:
                self._loading = None  # what it may still load is freed when its thread ends
                self._runner.drop_elsewhere()
                self._answer(
                    f"loading the drafter took more than {_LOAD_SECONDS:g} s and was cancelled"
                )
        if is_between and self._loading is None:
            for action in self._asked:
                self._answer(self._do(action))
            self._asked.clear()
        answers, self._answers = self._answers, []
        return [self._reply(answer) for answer in answers]

    def shutdown(self) -> None:
        """Wait up to two seconds for a load, because exiting during one can crash the
        interpreter."""
        if self._loading is not None:
            wait([self._loading], _END_SECONDS)

    def _load(self, model: str) -> None:
        speculator = self._runner.speculator
        config = getattr(speculator, "config", None)  # only drafters with a model have one
        if config is None or config.method not in _METHODS:
            self._answer(f"only drafters of the methods {', '.join(_METHODS)} can be swapped")
        elif self._loading is not None or self._exchange is not None:
            self._answer("another drafter is being tried")
        else:
            others = self._runner.load_elsewhere(model)
            self._loading = load_drafter(speculator, model, others)
            self._gives_up_at = time.monotonic() + _LOAD_SECONDS

    def _take(self, loaded: Exchange | str) -> None:
        if isinstance(loaded, str):
            self._runner.drop_elsewhere()
            self._answer(loaded)
        else:
            self._exchange = loaded
            # The trial compares both heads, so their measurements must begin at the same time.
            self._reset_measurements()
            self._answer(None)

    def _do(self, action: str) -> str | None:
        """Do "try", "keep" or "revert". Returns an error sentence if that is impossible now."""
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
        self._runner.drop_elsewhere()
        return None

    def _swap(self, exchange: Exchange) -> None:
        self._runner.exchange_drafter(exchange.swap)
        self._forget_kv()
        self._reset_measurements()

    def _reset_measurements(self) -> None:
        if self._drafts is not None:
            self._drafts.new_drafter()

    def _answer(self, error: str | None) -> None:
        self._answers.append(SpeculatorChanged(error))

    def _reply(self, answer: SpeculatorChanged) -> StepOutputs:
        outputs = self._news()
        outputs.speculator = answer
        if self._drafts is not None:
            self._drafts.tell_health(outputs.stats)
        return outputs


def load_drafter(
    speculator: Any, model: str, others: Callable[[], str | None] = lambda: None
) -> Future[Exchange | str]:
    """Load a head in a daemon thread, and wait there for `others`; the future is of the head, or of
    a sentence that says why there is none.

    Unlike an executor's thread it may hang: it delays no shutdown, and the next load gets a
    thread of its own.
    """
    future: Future[Exchange | str] = Future()

    def run() -> None:
        future.set_result(_load(speculator, model, others))

    threading.Thread(target=run, name="load-drafter", daemon=True).start()
    return future


def _load(speculator: Any, model: str, others: Callable[[], str | None]) -> Exchange | str:
    """Load a head; on failure return a sentence that says why.

    It raises nothing, because the frames of an exception would keep the refused head in memory,
    which the next load needs.
    """
    try:
        from ..drafters.exchange import load_other

        loaded = load_other(speculator, model)
        return others() or loaded
    except Exception as error:  # a malformed checkpoint can raise anything
        sentence = why_unreadable(error)
        _free_frames(error)
        return sentence


def _free_frames(error: BaseException | None) -> None:
    """Free what the frames of an error and its causes hold, without waiting for the collector."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
