"""What the runner offers a drafter while it loads: sizes, the target, the drafter's own weights.

A drafter's attention layers join the target's KV groups, so it needs no allocator of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...configs.schema import SpeculativeConfig
from ..attention.base import AttentionLayer
from ..batch.host_copy import StagingPool
from ..loading.inspection import Progress
from ..loading.weights import ResolvedModel
from .heads import FoundDrafter, load_head


class DraftModelHost:
    """Implements `speculators.base.DraftHost`."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        vocab_size: int,
        target_model: nn.Module,
        num_target_layers: int,
        target_resolved: ResolvedModel | None = None,
        drafter: FoundDrafter | None = None,  # the drafter's files, if they have been found
        loading: Progress | None = None,  # called with the bytes of the drafter that are read
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.target_model = target_model
        self.target_resolved = target_resolved  # its files may contain a drafter
        self.loading = loading
        self._drafter = drafter
        self.draft_layers: list[AttentionLayer] = []
        self._next_layer_id = num_target_layers
        self._staging = StagingPool(device)

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy a host array of int32 or int64 to the device, into `out` if given. Never waits."""
        return self._staging.upload(array, out)

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> Any:
        """Build the draft architecture `kind`, load its weights, register its attention layers."""
        layer_id = self._next_layer_id
        model: Any = load_head(kind, speculative, self, layer_id, self._drafter)
        self.loading = None  # a head that is loaded later is not part of the start
        layers = model.attention_layers()
        self.draft_layers += layers
        self._next_layer_id += len(layers)
        return model
