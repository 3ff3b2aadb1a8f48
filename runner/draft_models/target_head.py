"""The output head of draft models that have none of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...speculators.draft_head import DraftHead, PickTokens
from ..models.layers import CheckpointSlot, module_slots


class TargetHead(DraftHead):
    """A `DraftHead` whose logits are computed by the target's output head."""

    target: list[Any]  # the target's model, in a list so that it is no submodule
    prefix = ""  # of the names of its tensors in a checkpoint

    @property
    def pick_tokens(self) -> PickTokens | None:
        pick: PickTokens | None = getattr(self.target[0], "pick_tokens", None)
        return pick

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H], normalised -> [N, V]."""
        logits: Tensor = self.target[0].compute_logits(hidden)
        return logits

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        assert isinstance(self, nn.Module)
        return {f"{self.prefix}{name}": slot for name, slot in module_slots(self).items()}

    def finish_loading(self, dummy: bool = False) -> None:
        """Nothing to do: the target's tensors are used in place."""
