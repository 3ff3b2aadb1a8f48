"""The output head of draft models that have none of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...speculators.draft_head import DraftHead, PickTokens


class TargetHead(DraftHead):
    """A `DraftHead` whose logits are computed by the target's output head."""

    target: list[Any]  # the target's model, in a list so that it is no submodule

    @property
    def pick_tokens(self) -> PickTokens | None:
        pick: PickTokens | None = getattr(self.target[0], "pick_tokens", None)
        return pick

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H], normalised -> [N, V]."""
        logits: Tensor = self.target[0].compute_logits(hidden)
        return logits
