"""The model runner as the engine sees it: its steps, and handles on their results."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..scheduling.plan import RowResult, StepPlan
from ..step.parts import RunnerFacts
from .swap import ExchangesDrafter


class Handle(Protocol):
    """A launched step and its results, to come."""

    def wait(self, timeout: float) -> bool:
        """True once `get` needs no more than a short copy; False after `timeout` seconds."""

    def get(self) -> list[RowResult]:
        """Wait for the results, one per row of the plan in its order.

        Raises what the step raised.
        """


class ModelRunner(ExchangesDrafter, Protocol):
    """The calls that the engine makes. Steps run in the order in which they are launched."""

    @property
    def facts(self) -> RunnerFacts: ...

    def execute(self, plan: StepPlan) -> Handle:
        """Launch a whole step and return a handle on its results."""

    def forward(self, plan: StepPlan) -> None:
        """Launch a step up to its logits; `sample` must follow before any other launch."""

    def take_draft_token_ids(self, plan: StepPlan) -> list[list[int]]:
        """The draft ids that each row of the plan will verify; -1 where no draft was found.

        Waits for the step that made them. May be called only between `forward` and `sample`, if
        `plan.needs_draft_ids`.
        """

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None) -> Handle:
        """Launch the rest of a forwarded step.

        `grammar_bitmask` is [L, ceil(V / 32)] int32, None without a grammar. Each row of the plan
        has one line per draft that `take_draft_token_ids` listed (-1 included), plus one.
        """

    @property
    def idle_seconds(self) -> float | None:
        """How often `check` must be called while there is no work; None = never."""

    def check(self) -> None:
        """Raise RunnerError if other ranks that share the model have failed."""

    def shutdown(self) -> None:
        """Free the model and all device memory."""

    def abandon(self) -> None:
        """End other ranks of the model, in place of `shutdown`, where steps in flight may wait for
        other engines for ever. The process must end next."""
