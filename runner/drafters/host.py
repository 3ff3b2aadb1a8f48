"""What the runner offers a drafter while it loads: sizes, the target, the drafter's own weights.

A drafter's attention layers join the target's KV groups, so it needs no allocator of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...configs.schema import SpeculativeConfig
from ..attention.base import AttentionLayer
from ..batch.host_copy import StagingPool
from .heads import FoundDrafter, HeadHost, load_head


@dataclass(kw_only=True)
class DraftModelHost(HeadHost):
    """Implements `speculators.base.DraftHost`."""

    dtype: torch.dtype
    max_num_reqs: int
    max_num_tokens: int
    vocab_size: int
    drafter: FoundDrafter | None = None  # the drafter's files, if they have been found
    next_layer_id: int  # the first one is the number of the target's layers
    draft_layers: list[AttentionLayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._staging = StagingPool(self.device)

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy a host array of int32 or int64 to the device, into `out` if given. Never waits."""
        return self._staging.upload(array, out)

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> Any:
        """Build the draft architecture `kind`, load its weights, register its attention layers."""
        layer_id = self.next_layer_id
        model: Any = load_head(kind, speculative, self, layer_id, self.drafter)
        self.loading = None  # a head that is loaded later is not part of the start
        layers = model.attention_layers()
        self.draft_layers += layers
        self.next_layer_id += len(layers)
        return model
