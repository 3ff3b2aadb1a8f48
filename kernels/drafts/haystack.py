"""What prompt lookup searches: the request rows, and the texts that clients expect."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OUTSIDE = -2  # stands for "before the output" and "before the prediction", which match


@dataclass(frozen=True)
class Predictions:
    """The texts that clients expect, one after another."""

    token_ids: Tensor  # [T] int32
    start: Tensor  # [R] int64, slot -> index of its text's first token
    length: Tensor  # [R] int64, slot -> tokens of its text; 0 = none
    longest: int  # no slot has a longer one


@dataclass(frozen=True)
class Haystack:
    """The request rows to search; rows are slots."""

    token_ids: Tensor  # [R, S] int32, prompt, then output
    prompt_len: Tensor  # [R] int32
    predictions: Predictions | None = None  # None = nobody has one
