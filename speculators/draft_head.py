"""The interface of a draft model, and its defaults for a head that is a plain `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

# Hidden states [N, H] and further arguments of the kernel -> (token ids [N], ...).
PickTokens = Callable[..., tuple[Tensor, Tensor]]


class DraftModel(Protocol):
    """The model of an `AutoRegressiveSpeculator`. Its functions may be recorded in a graph, so they
    must not read values of the device."""

    input_width: int  # of the target's hidden states that the first pass reads
    feedback_width: int  # of the hidden state that one pass hands to the next

    @property
    def draft_to_target(self) -> Tensor | None:
        """[draft vocabulary] int64 target ids; None if the vocabularies are the same."""

    @property
    def pick_tokens(self) -> PickTokens | None:
        """Picks the likeliest tokens without writing logits (see `TextModel.pick_tokens`)."""

    def combine(self, target_hidden: Tensor) -> Tensor:
        """[M, input_width] of the target -> [M, feedback_width] as `run` reads it."""

    def run(
        self,
        input_ids: Tensor,  # [M]
        positions: Tensor,  # [M]
        hidden: Tensor,  # [M, feedback_width]
        attention: Any,
        feedback: Tensor,  # [N, feedback_width]; may be the memory of `hidden`
        only: Tensor | None = None,  # [N] int64 token rows; None = all, N = M
    ) -> Tensor:
        """One pass that writes the KV of all rows. Returns what `compute_logits` reads, [N, .], and
        writes the hidden states of the next pass to `feedback`; both for the rows `only`."""

    def write_kv(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Any
    ) -> None:
        """Write the KV that `run` would write."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, .] -> [N, draft vocabulary]."""


class DraftHead:
    """Makes a module with `input_width`, `feedback_width` and `compute_logits` a `DraftModel`.

    Its `forward(input_ids, positions, hidden, attention)` returns [M, .] for all rows: one tensor
    for both the logits and the next pass, or a pair (for the logits, for the next pass).
    """

    forward: Callable[..., Any]
    draft_to_target: Tensor | None = None

    @property
    def pick_tokens(self) -> PickTokens | None:
        """None: the logits are written."""
        return None

    def combine(self, target_hidden: Tensor) -> Tensor:
        return target_hidden

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: Any,
        feedback: Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        out = self.forward(input_ids, positions, hidden, attention)
        for_logits: Tensor
        for_logits, fed_back = out if isinstance(out, tuple) else (out, out)
        if only is not None:
            for_logits, fed_back = for_logits[only], fed_back[only]
        feedback.copy_(fed_back)
        return for_logits

    def write_kv(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Any
    ) -> None:
        self.forward(input_ids, positions, hidden, attention)
