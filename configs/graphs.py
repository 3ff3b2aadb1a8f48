"""The vocabulary of graph capture: modes and batch descriptors. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class CUDAGraphMode(Enum):
    """What is captured; a pair is (uniform decode batches, all other batches)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> CUDAGraphMode:
        """Mode of uniform decode (or verify) batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Mode of every other batch."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def without_pieces(self) -> CUDAGraphMode:
        """What is left of this mode for a pass that is replayed whole or runs eagerly."""
        if self is CUDAGraphMode.FULL:
            return self
        full = self.decode_mode() is CUDAGraphMode.FULL
        return CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE

    def separate_routine(self) -> bool:
        """True if uniform and other batches are captured separately."""
        return isinstance(self.value, tuple)


class AttentionCGSupport(IntEnum):
    """Which batches an attention back end can run inside a FULL graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class StepMode(Enum):
    """How one step runs; decided once, when its rows are gathered."""

    EAGER = "eager"  # no graph
    PIECEWISE = "piecewise"  # graphs between the attention layers
    FORWARD = "forward"  # one graph of the forward pass; the host gathers rows, builds attention
    WHOLE = "whole"  # that graph gathers and builds, too; those of sampling and drafting follow it


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """How a (padded) batch runs. `mode` is NONE, PIECEWISE or FULL."""

    mode: CUDAGraphMode
    num_tokens: int  # M*, padded token rows
    num_reqs: int | None = None  # N*, padded requests; None = requests are not padded
    uniform_token_count: int | None = None  # every request has this query length; None = any

    def serves(self, num_tokens: int, num_reqs: int, uniform_token_count: int | None) -> bool:
        """True if a batch of these sizes can be padded into this descriptor."""
        return (
            self.num_tokens >= num_tokens
            and (self.num_reqs is None or self.num_reqs >= num_reqs)
            and self.uniform_token_count in (None, uniform_token_count)
        )
