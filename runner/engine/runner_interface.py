"""What the engine needs of a model runner: its facts, its steps, the handles on their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..scheduling.kv_blocks import BlockGroup
from ..scheduling.plan import RowResult, StepPlan
from .swap import ExchangesDrafter

if TYPE_CHECKING:
    from ...speculators.base import SpeculatorNeeds


class Handle(Protocol):
    """Results of a launched step."""

    def wait(self, timeout: float) -> bool:
        """True once `get` waits no longer than a copy takes; False if `timeout` seconds pass."""

    def get(self) -> list[RowResult]:
        """Wait for them: one per row of the plan, in its order. Raises what the step raised."""


class RunnerFacts(Protocol):
    """What a model runner tells about itself once it is ready."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_groups(self) -> Sequence[BlockGroup]: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def attention_backend(self) -> str: ...

    @property
    def needs(self) -> SpeculatorNeeds: ...

    @property
    def startup_seconds(self) -> dict[str, float]: ...

    @property
    def step_seconds(self) -> dict[tuple[int, int], float]: ...

    @property
    def lowered_claims(self) -> Sequence[str]: ...


class ModelRunner(ExchangesDrafter, Protocol):
    """What the engine needs of the model runner. Steps run in the order of their launch."""

    @property
    def facts(self) -> RunnerFacts: ...

    def execute(self, plan: StepPlan) -> Handle:
        """Launch a whole step."""

    def forward(self, plan: StepPlan) -> None:
        """Launch a step up to its logits; `sample` must follow before any other launch."""

    def take_draft_token_ids(self, plan: StepPlan) -> list[list[int]]:
        """Real ids of the drafts that each row of the plan will verify; -1 where there is none.

        Waits for the step that made them. Called between `forward` and `sample`, and only if
        `plan.needs_draft_ids`.
        """

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None) -> Handle:
        """Launch the rest of the step.

        `grammar_bitmask` is [L, ceil(V / 32)] int32: for each row of the plan one line per draft
        that `take_draft_token_ids` listed (-1 included), and one more.
        """

    def shutdown(self) -> None:
        """Free everything."""
