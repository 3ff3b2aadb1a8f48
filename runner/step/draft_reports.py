"""Copies the drafts that a step verifies to the host, for the requests that report them.

Drafts never change what is emitted, so only a look at the drafts themselves shows a faulty drafter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..batch.host_copy import CopyStream, HostCopy, StagingPool
from ..batch.request_table import RequestTable
from ..scheduling.plan import RowResult, StepPlan

Report = Callable[[list[RowResult]], None]  # writes the drafts into the results of a step


class DraftReports:
    """Knows the slots of requests that report their drafts."""

    def __init__(self, device: torch.device) -> None:
        self._slots: set[int] = set()
        self._staging = StagingPool(device)

    def update(self, plan: StepPlan) -> None:
        """Note the slots that `plan` frees and fills."""
        if self._slots:
            self._slots.difference_update(plan.freed_slots)
        for new in plan.new_requests:
            self._slots.discard(new.slot)
            if new.sampling.report_drafts:
                self._slots.add(new.slot)

    @property
    def is_asked(self) -> bool:
        return bool(self._slots)

    def start(
        self, plan: StepPlan, table: RequestTable, stream: CopyStream | None
    ) -> Report | None:
        """Start the copy of this step's drafts, before it samples; None if no row reports any."""
        rows = [index for index, row in enumerate(plan.rows) if row.slot in self._slots]
        if not rows:
            return None
        slots = self._staging.upload(np.array([plan.rows[row].slot for row in rows], np.int64))
        copy = HostCopy([table.draft_tokens[slots]], stream)  # [rows, K]

        def fill(results: list[RowResult]) -> None:
            found = copy.wait()[0].tolist()
            copy.release()
            for row, ids in zip(rows, found, strict=True):
                results[row].draft_token_ids = ids[: results[row].num_draft_tokens]

        return fill
