"""The step buffers that gathering writes, poisoned: what a kernel forgets to write shows."""

from __future__ import annotations

import torch
from torch import Tensor

POISON = 77


def poisoned_buffers(max_reqs: int, max_tokens: int) -> dict[str, Tensor]:
    """By the names of `InputBatch`, each [max_reqs] or [max_tokens]; on the CPU."""
    buffers = {
        "seq_lens": (max_reqs, torch.int32),
        "num_draft_tokens": (max_reqs, torch.int32),
        "input_ids": (max_tokens, torch.int32),
        "positions": (max_tokens, torch.int64),
        "logits_indices": (max_tokens, torch.int64),
        "expanded_idx_mapping": (max_tokens, torch.int32),
        "expanded_local_pos": (max_tokens, torch.int32),
        "draft_ids": (max_tokens, torch.int64),
        "logits_positions": (max_tokens, torch.int64),
    }
    return {name: torch.full((size,), POISON).to(dtype) for name, (size, dtype) in buffers.items()}
