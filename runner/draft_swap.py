"""Serves requests to exchange a running drafter's weights, between two steps and without a stop.

A checkpoint is read in a thread while steps run on. Its weights are exchanged for the running ones,
which are kept until it is settled which stay. Imports no torch; see `draft_exchange`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from .errors import RunnerError
from .messages import ChangeSpeculator, SpeculatorChanged, StepOutputs, StepStats

if TYPE_CHECKING:
    from torch import nn

    from .draft_planner import DraftPlanner

_POLL_SECONDS = 0.02  # how long an otherwise idle step waits for a checkpoint
_METHODS = ("eagle", "eagle3")
_REFUSALS = (RunnerError, ValueError, OSError, RuntimeError)


class DraftSwap:
    """Serves `ChangeSpeculator` messages; the engine polls it once a step."""

    def __init__(self, runner: Any, drafts: DraftPlanner | None = None) -> None:
        self._runner = runner  # a `ModelRunner`; the exchange runs in the order of its steps
        self._drafts = drafts  # what chooses K must learn anew
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-drafter")
        self._loading: Future[nn.Module] | None = None
        self._other: nn.Module | None = None  # the loaded one; the old weights while it is tried
        self._is_tried = False
        self._answers: list[StepOutputs] = []

    @property
    def is_busy(self) -> bool:
        """`poll` has something to do or to wait for."""
        return self._loading is not None or bool(self._answers)

    def start(self, message: ChangeSpeculator) -> None:
        """Begin what the message asks for; `poll` gives the answer."""
        if message.action == "load":
            self._load(message.model)
        elif message.action == "try":
            self._try()
        elif self._other is None:
            self._answer("no drafter is being tried")
        else:
            if message.action == "revert" and self._is_tried:
                self._exchange()
            self._other, self._is_tried = None, False
            self._answer(None)

    def poll(self, is_idle: bool) -> list[StepOutputs]:
        """The answers so far; waits a little for one if nothing else is to be done."""
        if self._loading is not None:
            if is_idle:
                wait([self._loading], _POLL_SECONDS)
            if self._loading.done():
                self._take(self._loading)
                self._loading = None
        answers, self._answers = self._answers, []
        return answers

    def shutdown(self) -> None:
        """End the thread."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _load(self, model: str) -> None:
        speculator = getattr(self._runner, "_speculator", None)
        config = getattr(speculator, "config", None)  # only drafters with a model keep theirs
        if config is None or config.method not in _METHODS:
            self._answer(f"only drafters of the methods {', '.join(_METHODS)} can be exchanged")
        elif self._loading is not None or self._other is not None:
            self._answer("another drafter is being tried")
        else:
            self._loading = self._loader.submit(_load, speculator, model)

    def _take(self, loading: Future[nn.Module]) -> None:
        try:
            self._other = loading.result()
            self._answer(None)
        except _REFUSALS as error:
            self._answer(_sentence(error))

    def _try(self) -> None:
        if self._other is None or self._is_tried:
            self._answer("no drafter is loaded that could be tried")
            return
        try:
            self._exchange()
            self._is_tried = True
            self._answer(None)
        except _REFUSALS as error:
            self._answer(_sentence(error))

    def _exchange(self) -> None:
        from .draft_exchange import exchange

        ours, other = self._runner._speculator.model, self._other
        assert other is not None

        def swap() -> None:
            exchange(ours, other)
            self._runner.table.forget_drafts()

        self._runner._queue.call(swap)
        if self._drafts is not None:
            self._drafts.new_drafter()

    def _answer(self, error: str | None) -> None:
        answer = SpeculatorChanged(error)
        self._answers.append(StepOutputs([], StepStats(), speculator=answer))


def _load(speculator: Any, model: str) -> nn.Module:
    from .draft_exchange import load_other

    return load_other(speculator, model)


def _sentence(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else repr(error)
