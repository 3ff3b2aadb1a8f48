"""What prompt lookup searches: the request rows, and the texts that clients expect."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OUTSIDE = -2  # stands for "before the output" and "before the prediction", which match


@dataclass(frozen=True)
class Haystack:
    """The request rows to search; rows are slots."""

    token_ids: Tensor  # [R, S] int32, prompt, then output
    prompt_len: Tensor  # [R] int32
    prediction_ids: Tensor | None = None  # [R, P] int32
    prediction_len: Tensor | None = None  # [R] int64, 0 = no prediction
