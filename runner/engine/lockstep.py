"""The steps that an engine without work runs, because engines that share its experts have some.

Each engine has its own requests and scheduler, but every MoE layer needs the ranks of all engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..messages import ExpertLoad
from ..scheduling.plan import StepPlan

if TYPE_CHECKING:
    from ..parallel.engine_group import Calls
    from ..step.data_parallel import DataParallelSync


class Lockstep:
    """One engine's view of the group. Only the engine's thread calls it.

    The thread that runs steps has the last word: it skips the plans of a group that rests.
    """

    def __init__(self, sync: DataParallelSync, calls: Calls) -> None:
        self._sync, self._calls = sync, calls
        self.socket = calls.socket  # readable when other engines may have called
        self._wave: int | None = None  # to which this engine is called and has not come yet
        self._num_plans = 0

    @property
    def is_due(self) -> bool:
        """Whether other engines may need a step of this one."""
        heard = self._calls.heard()
        if heard is not None:
            self._wave = heard
        return self._wave is not None or self._sync.is_active

    def num_drafts(self, wanted: int) -> int:
        """How many drafts the next step verifies if this engine alone would verify `wanted`.

        A step of the CPU may still have to agree on it. It then verifies what was made: a missing
        draft is rejected.
        """
        return max(wanted, self._sync.kept_drafts) if wanted else 0

    def take_load(self) -> ExpertLoad | None:
        return None if self._sync.loads is None else self._sync.loads.take()

    def plan(self) -> StepPlan | None:
        """The plan of a step without rows; None if no other engine needs one."""
        if not self.is_due:
            return None
        wave, self._wave = self._wave, None
        self._num_plans += 1
        return StepPlan(-self._num_plans, wave=wave)
