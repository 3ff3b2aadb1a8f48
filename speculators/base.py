"""The interface of every drafter, and the data it drafts from. Knows nothing about the runner.

A speculator is tensor code: `propose` never waits for the device. What it needs of the runner comes
in through `DraftInputs` (per step) and `DraftHost` (once).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ..configs.schema import SpeculativeConfig


@dataclass(frozen=True)
class SpeculatorNeeds:
    """What a drafter asks of the runner; the runner never tests a method's name."""

    num_speculative_tokens: int  # K: verified rows per request are at most K + 1
    num_lookahead_tokens: int = 0  # KV slots beyond the target's tokens, for drafts' KV
    aux_hidden_state_boundaries: tuple[int, ...] = ()  # boundary b = residual stream after b layers
    hidden_states: bool = False  # the target's hidden states after the final norm
    draft_logits: bool = False  # store q per slot, for probabilistic verification


class RequestRows(Protocol):
    """The request table's tensors that a drafter reads and writes; rows are slots."""

    all_token_ids: Tensor  # [R, max_model_len] int32
    prompt_len: Tensor  # [R] int32
    prefill_len: Tensor  # [R] int32
    total_len: Tensor  # [R] int32, tokens known (after post_update)
    num_computed_tokens: Tensor  # [R] int32, tokens whose KV is valid (after post_update)
    last_sampled_tokens: Tensor  # [R] int64
    next_prefill_tokens: Tensor  # [R] int64, token after the current prefill chunk
    draft_tokens: Tensor  # [R, K] int64, -1 = none
    draft_logits: Tensor | None  # [R, K, V] float32
    temperature: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    max_drafts: Tensor  # [R] int32, per-request cap on drafts (0 = speculation off for it)


@dataclass(frozen=True)
class DraftInputs:
    """Everything `propose` may read. N* rows, M* tokens; padded rows have idx_mapping -1."""

    num_reqs: int  # N, real rows
    num_tokens: int  # M, real tokens
    descriptor: BatchExecutionDescriptor  # how the target ran
    idx_mapping: Tensor  # [N*] int32, batch row -> slot
    query_start_loc: Tensor  # [N* + 1] int32
    seq_lens: Tensor  # [N*] int32, before rejection
    input_ids: Tensor  # [M*] int32
    positions: Tensor  # [M*] int64
    num_sampled: Tensor  # [N] int32, emitted tokens (0 for a prefill chunk)
    num_rejected: Tensor  # [N] int32
    requests: RequestRows
    attention: Any = None  # the target's AttentionState of this step
    common: Sequence[Any] = ()  # the target's CommonAttentionMetadata by group
    hidden_states: Tensor | None = None  # [M, H] after the final norm
    aux_hidden_states: Sequence[Tensor] = ()  # one [M, H] per boundary asked for


class GraphManager(Protocol):
    """Captures and replays graphs of one forward function (`runner.cuda_graphs`)."""

    def dispatch(
        self, num_tokens: int, num_reqs: int, uniform_token_count: int | None
    ) -> BatchExecutionDescriptor: ...

    def capture(self, create_forward_fn: Any) -> dict[BatchExecutionDescriptor, Any]: ...

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> None: ...


class DraftHost(Protocol):
    """What the runner offers a drafter with a model of its own."""

    device: torch.device
    dtype: torch.dtype
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    target_model: nn.Module

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> nn.Module:
        """Build the draft architecture `kind`, load its weights, register its attention layers."""

    def build_draft_attention(
        self,
        num_reqs: int,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        idx_mapping: Tensor,
        desc: BatchExecutionDescriptor | None,
        for_capture: bool = False,
    ) -> Any:
        """An AttentionState for one-token-per-request draft decodes, slots from `positions`."""

    def create_graph_manager(
        self, name: str, mode: CUDAGraphMode, uniform_token_counts: Sequence[int]
    ) -> GraphManager:
        """A manager that shares the device's graph pool."""


@dataclass
class SpeculatorStats:
    """What a speculator tells the metrics beyond acceptance."""

    current_num_speculative_tokens: int = 0
    reason: str = ""
    counters: dict[str, float] = field(default_factory=dict)


class BaseSpeculator(ABC):
    """A drafter."""

    needs: SpeculatorNeeds

    def init_cudagraph_manager(self, mode: CUDAGraphMode) -> None:
        """Choose the drafter's graph modes. Without a model there is nothing to capture."""

    def capture(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> None:
        """Capture the drafter's graphs; `attention_states` are the target's `AttentionStatePair`s."""

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> Tensor:
        """Draft for every row; returns [N, K] int64 with -1 where there is no draft. Never syncs."""
