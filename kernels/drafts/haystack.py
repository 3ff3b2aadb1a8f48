"""The texts that prompt lookup searches: requests' tokens, and the outputs that clients predict."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OUTSIDE = -2  # token id for "before the output" and "before the prediction", which match


@dataclass(frozen=True)
class Predictions:
    """The predicted outputs of all requests, concatenated."""

    token_ids: Tensor  # [T] int32
    start: Tensor  # [R] int64, slot -> index of its first token
    length: Tensor  # [R] int64, slot -> number of tokens; 0 = no prediction
    longest: int  # an upper bound of `length`


@dataclass(frozen=True)
class Haystack:
    """The texts to search, by slot."""

    token_ids: Tensor  # [R, S] int32, prompt, then output
    prompt_len: Tensor  # [R] int32
    predictions: Predictions | None = None  # None = no request has one
