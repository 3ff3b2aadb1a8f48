"""The sizes of a step that the host knows."""

from __future__ import annotations

from typing import NamedTuple


class StepSizes(NamedTuple):
    """The numbers of rows in a step, real and padded."""

    num_reqs: int  # N
    num_tokens: int  # M
    num_logits: int  # L
    num_reqs_padded: int  # N*
    num_tokens_padded: int  # M*
