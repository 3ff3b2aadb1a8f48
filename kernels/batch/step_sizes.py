"""How large a step is, as the host knows it."""

from __future__ import annotations

from typing import NamedTuple


class StepSizes(NamedTuple):
    """Rows of a step, and the numbers that they are padded to."""

    num_reqs: int  # N
    num_tokens: int  # M
    num_logits: int  # L
    num_reqs_padded: int  # N*
    num_tokens_padded: int  # M*
