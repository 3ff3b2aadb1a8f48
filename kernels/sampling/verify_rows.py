"""The input of verification: logits, drafts, and the request of each row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VerifyRows:
    """L logits rows of N requests; the rows of a request follow one another."""

    # [L, V] float32, processed; their softmax is the target's distribution p. With `temperature`
    # they may be of any float type and are not divided by it yet; with `drawn`, [L, 0] suffices
    # if no row is verified by rejection.
    logits: Tensor
    draft_ids: Tensor  # [L] int64, the draft that the row verifies; -1 = none
    draft_logits: Tensor | None  # [R, K, Vd] float32 by slot, softmax = q; None: q is one-hot
    slots: Tensor  # [L] int32, logits row -> slot
    local_pos: Tensor  # [L] int32, the row's number within its request, 0 .. n_draft
    cu_num_logits: Tensor  # [N + 1] int32, batch row -> first logits row
    seeds: Tensor  # [L] int64
    positions: Tensor  # [L] int64, sequence position of the row
    greedy: Tensor  # [L] bool, temperature 0
    all_greedy: bool  # host: no row needs random numbers
    any_greedy: bool  # host
    width: int  # K + 1
    seeded: Tensor | None = None  # [R] by slot, nonzero = the request has a seed; None: none has
    all_seeded: bool = False  # host: every request that needs random numbers has a seed
    drawn: Tensor | None = None  # [L] int64, tokens drawn from the target
    temperature: Tensor | None = None  # [L] float32, to divide the logits by; 0 = greedy

    @property
    def has_drafts(self) -> bool:
        """Whether a request has more than one logits row; known on the host from shapes."""
        return self.draft_ids.shape[0] > self.cu_num_logits.shape[0] - 1
