"""What one verification reads: processed logits, drafts, and where each row belongs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VerifyRows:
    """L logits rows of N requests; the rows of a request follow one another."""

    logits: Tensor  # [L, V] float32, processed; softmax = the target's distribution p. See below
    draft_ids: Tensor  # [L] int64, draft judged by the row; -1 = none
    draft_logits: Tensor | None  # [R, K, Vd] float32 by slot, softmax = q; None: q is one-hot
    slots: Tensor  # [L] int32, logits row -> slot
    local_pos: Tensor  # [L] int32, 0 .. n_draft
    cu_num_logits: Tensor  # [N + 1] int32, batch row -> first logits row
    seeds: Tensor  # [L] int64
    positions: Tensor  # [L] int64, sequence position of the row
    greedy: Tensor  # [L] bool, temperature 0
    all_greedy: bool  # host: no row needs random numbers
    any_greedy: bool  # host
    width: int  # K + 1
    seeded: Tensor | None = None  # [R] by slot, not 0 = named a seed; None: nobody did
    all_seeded: bool = False  # host: every request that needs random numbers named a seed
    drawn: Tensor | None = None  # [L] int64, the target's own tokens; then logits may be [L, 0]
    # [L] float32: logits, in any float, are still to be divided by it, where it is not 0 (greedy)
    temperature: Tensor | None = None

    @property
    def has_drafts(self) -> bool:
        """False if the layout has one row per request; known on the host."""
        return self.draft_ids.shape[0] > self.cu_num_logits.shape[0] - 1
