"""Step buffers for tests, filled with poison so that unwritten values are noticed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

POISON = 77


def poisoned_buffers(max_reqs: int, max_tokens: int) -> dict[str, Tensor]:
    """The buffers by the names of `InputBatch`, each [max_reqs] or [max_tokens]; on the CPU."""
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


def sampled_tokens(
    token_ids: Tensor, num_sampled: Tensor, num_rejected: Tensor, has_nan: Tensor | None = None
) -> SimpleNamespace:
    """The samples of a step, in the form that `post_update` and `commit_step` read."""
    return SimpleNamespace(
        sampled_token_ids=token_ids,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        has_nan=has_nan,
    )
