"""Defines CUDA graph modes and batch descriptors, as plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class CUDAGraphMode(Enum):
    """Which parts of a step run in CUDA graphs; a pair is (uniform decode, all other batches)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)
    FULL_AND_FULL = (2, 2)  # each kind has graphs of its own, unlike in FULL

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of uniform batches, in which every request decodes or verifies alike."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of all batches that are not uniform."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def separate_routine(self) -> bool:
        """Whether uniform batches and others have modes, and so captures, of their own."""
        return isinstance(self.value, tuple)


class AttentionCGSupport(IntEnum):
    """Which batches an attention back end can run inside a FULL graph; higher includes lower."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class StepMode(Enum):
    """How one step runs; the decision is made once, when its rows are gathered."""

    EAGER = "eager"  # no graph
    PIECEWISE = "piecewise"  # graphs between the attention layers
    FORWARD = "forward"  # one graph of the forward pass; the host gathers rows, builds attention
    WHOLE = "whole"  # that graph also gathers and builds; graphs of sampling and drafting follow


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """The mode and padded sizes with which a batch runs; `mode` is NONE, PIECEWISE or FULL."""

    mode: CUDAGraphMode
    num_tokens: int  # M*, padded token rows
    num_reqs: int | None = None  # N*, padded requests; None = requests are not padded
    uniform_token_count: int | None = None  # every request has this query length; None = any

    def serves(self, num_tokens: int, num_reqs: int, uniform_token_count: int | None) -> bool:
        """Whether a batch of these sizes can be padded to this descriptor's sizes."""
        return (
            self.num_tokens >= num_tokens
            and (self.num_reqs is None or self.num_reqs >= num_reqs)
            and self.uniform_token_count in (None, uniform_token_count)
        )
