"""The interface of every drafter, and the data it drafts from. Knows nothing about the runner.

A speculator is tensor code: `propose` never waits for the device. What it needs of the runner comes
in through `DraftInputs` (per step) and `DraftHost` (once).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ..configs.schema import SpeculativeConfig
from ..kernels.drafts.draw_drafts import draw_drafts, take_drafts
from ..kernels.drafts.stage_drafts import store_draft_rows

MAX_DRAFT_LOGITS_BYTES = 1 << 30  # above this, `draft_sampling: auto` drafts greedily


@dataclass(frozen=True)
class SpeculatorNeeds:
    """What a drafter asks of the runner; the runner never tests a method's name."""

    num_speculative_tokens: int  # K: verified rows per request are at most K + 1
    num_lookahead_tokens: int = 0  # KV slots beyond the target's tokens, for drafts' KV
    aux_hidden_state_boundaries: tuple[int, ...] = ()  # boundary b = residual stream after b layers
    hidden_states: bool = False  # the target's hidden states after the final norm
    draft_logits: bool = False  # store q per slot, for probabilistic verification
    max_deferred_tokens: int = 0  # how far its own state may stay behind the text; 0 = it has none
    per_request_drafts: bool = False  # rows without drafts take no time: K may differ by request
    watched: bool = True  # few accepted drafts mean a fault, and not that the text has none to find
    kv_needs_next_token: bool = False  # its KV at a position depends on the token after it, too


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
    draft_logits: Tensor | None  # [R, K, V] float32, -inf where a drafter never writes
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
    aux_hidden_states: Tensor | None = None  # [M, taps * H], boundaries asked for, side by side
    num_drafts: int | None = None  # how many to make; None = K; 0 = only take the step in
    num_decode_reqs: int = 0  # rows of each draft decode at least: as many as other ranks have
    num_deferred: Sequence[int] = ()  # [N] on the host: tokens before the row given to `defer`
    in_buffers: bool = False  # the tensors are those of `StepBuffers`: a graph may read them


@dataclass(frozen=True)
class StepBuffers:
    """What graphs of a drafter find of the target's steps, always at the same addresses."""

    # The step of a uniform batch, with N* and M* for N and M: padded rows have slot -1.
    inputs: Callable[[BatchExecutionDescriptor], DraftInputs]
    requests: RequestRows
    most_drafts: Tensor  # [R] int32 by batch row, how many drafts the plan lets a request keep


class GraphManager(Protocol):
    """Captures and replays graphs of one forward function (`runner.graphs.manager`)."""

    report: Any  # what was captured

    def dispatch(
        self, num_tokens: int, num_reqs: int, uniform_token_count: int | None
    ) -> BatchExecutionDescriptor: ...

    def capture(self, create_forward_fn: Any) -> dict[BatchExecutionDescriptor, Any]: ...

    def profile_memory(self, create_forward_fn: Any) -> int: ...

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

    def upload(self, array: np.ndarray) -> Tensor:
        """A host array of int32 or int64 on the device, without a wait."""

    def build_draft_attention(
        self,
        num_reqs: int,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        idx_mapping: Tensor,
        desc: BatchExecutionDescriptor | None,
        for_capture: bool = False,
        writes_kv: bool = True,
        query_lens: Sequence[int] | None = None,
    ) -> Any:
        """An AttentionState for draft decodes of one token per request, or of `query_lens` [N].

        KV slots come from `positions` (-1 = none); without `writes_kv` they are all -1.
        """

    @property
    def draft_decodes_on_device(self) -> bool:
        """Whether one graph can hold several decodes, their attention included."""

    def stage_draft_tables(self, num_reqs: int, rows: int, idx_mapping: Tensor) -> None:
        """Bring this step's block tables to where such a graph reads them; it may do so itself."""

    def attention_on_device(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        desc: BatchExecutionDescriptor,
        writes_kv: bool = True,
    ) -> Callable[[], Any]:
        """For its capture: builds the attention of one more decode from what the buffers hold."""

    def create_graph_manager(
        self,
        name: str,
        mode: CUDAGraphMode,
        uniform_token_counts: Sequence[int],
        label: str | None = None,
        few_sizes: bool = False,
    ) -> GraphManager:
        """A manager that shares the device's graph pool."""


class BaseSpeculator(ABC):
    """A drafter."""

    needs: SpeculatorNeeds

    def init_cudagraph_manager(self, mode: CUDAGraphMode) -> None:
        """Choose the drafter's graph modes. Without a model there is nothing to capture."""
        return

    def capture(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> None:
        """Capture the drafter's graphs; given are the target's `AttentionStatePair`s."""
        return

    def profile_graph_memory(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> int:
        """Bytes that `capture` will take, measured on throw-away graphs before KV is sized."""
        return 0

    def use_requests(self, requests: RequestRows) -> None:
        """Called once, before anything runs: these are the requests of all steps."""
        return

    def read_steps(self, steps: StepBuffers) -> None:
        """Graphs captured from now on may read the target's steps, and keep the drafts."""
        return

    @property
    def keeps_drafts(self) -> bool:
        """Whether `propose` itself writes drafts to the request table, as `StepBuffers` allow."""
        return False

    def takes_in(self, descriptor: BatchExecutionDescriptor) -> bool:
        """Whether steps of this descriptor are read by a graph, and need no attention state."""
        return False

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> Tensor:
        """Draft for every row; [N, up to K] int64, -1 where there is no draft. Never syncs."""

    def run_dummy(
        self,
        descriptor: BatchExecutionDescriptor,
        attention: Any,
        num_decode_reqs: int,
        num_drafts: int,
    ) -> None:
        """Run the passes of a proposal for nobody: other ranks' passes hold collectives.

        `attention` is the target's state of the same dummy step.
        """
        return

    def graph_managers(self) -> Sequence[GraphManager]:
        """The managers of its graphs, for the report of what was captured."""
        return ()

    def defer(self, inputs: DraftInputs) -> None:
        """Called in place of `propose` after a step for whose rows nothing is to be drafted.

        Every row has one token and verified no draft. A drafter with state of its own
        (`needs.max_deferred_tokens`) keeps what it needs to take these tokens in later.
        """
        return


class DraftModelSpeculator(BaseSpeculator):
    """A drafter with a model: loads it, owns the buffers that its graphs bake, draws drafts.

    Buffers are indexed by batch row [R] or token row [T]. Every call fills their padded rows too.
    """

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        self.config = config
        self.host = host
        self.num_drafts = config.max_drafts  # K
        self.model: Any = self.load_draft_model()
        self.max_position = min(host.max_model_len, config.max_model_len or host.max_model_len)
        reqs, tokens = host.max_num_reqs, host.max_num_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=host.device)

        self.input_ids = zeros(tokens, dtype=torch.int32)  # [T] shifted by one
        self.positions = zeros(tokens)  # [T] of the target's hidden states: not shifted
        self.last_token_indices = zeros(reqs)  # [R] batch row -> token row
        self.idx_mapping = zeros(reqs, dtype=torch.int32)  # [R] batch row -> slot, padded -1
        self.query_start_loc = zeros(reqs + 1, dtype=torch.int32)  # [R + 1] min(i, N)
        self.decode_ids = zeros(reqs, dtype=torch.int32)  # [R] newest draft
        self.decode_positions = zeros(reqs)  # [R]
        self.write_positions = zeros(reqs)  # [R] where a decode's KV goes, -1 = nowhere
        self.seq_lens = zeros(reqs, dtype=torch.int32)  # [R] decode position + 1, padded 0
        self.noise_positions = zeros(reqs)  # [R] position of the target row that draws the token
        self.temperature = zeros(reqs, dtype=torch.float32)  # [R]
        self.seed = zeros(reqs)  # [R]
        self.draft_tokens = zeros(reqs, self.num_drafts)  # [R, K]
        self.allowed = zeros(reqs, dtype=torch.int32)  # [R] drafts that the request may keep
        self._steps: StepBuffers | None = None  # not None: it keeps its drafts itself
        self.step = zeros(reqs)  # [R] which draft is made next; on the device as graphs replay
        self._requests: RequestRows | None = None

    @abstractmethod
    def load_draft_model(self) -> nn.Module:
        """Load the drafter's model through the host and wire what it shares with the target."""

    def use_requests(self, requests: RequestRows) -> None:
        """What drafts are drawn from goes straight to their slots."""
        self._requests = requests

    def read_steps(self, steps: StepBuffers) -> None:
        """Graphs read uniform steps, and bring drafts to the requests' slots."""
        self._steps = steps

    @property
    def keeps_drafts(self) -> bool:
        """True once there are steps to read."""
        return self._steps is not None

    @property
    def probabilistic(self) -> bool:
        """Whether drafts are drawn from q (kept for verification) or are the most likely tokens."""
        if self.config.draft_sampling != "auto":
            return self.config.draft_sampling == "probabilistic"
        size = self.host.max_num_reqs * self.num_drafts * self.host.vocab_size * 4
        return size <= MAX_DRAFT_LOGITS_BYTES

    @property
    def draft_logits(self) -> Tensor | None:
        """What drafts are drawn from, [R, K, V] float32 by slot; None = they are the likeliest."""
        return None if self._requests is None else self._requests.draft_logits

    def draw_drafts(self, for_logits: Tensor) -> None:
        """Draw the next draft of each row from what the head reads, [N*, H]; without writing
        logits where the model can (`pick_tokens`) and verification does not ask for them.

        Noise is salted: it must not be the noise that verification uses.
        """
        pick = getattr(self.model, "pick_tokens", None)
        to_target: Tensor | None = getattr(self.model, "draft_to_target", None)
        if pick is None or self.draft_logits is not None:
            logits = self.model.compute_logits(for_logits)
            draw_drafts(logits, self, to_target, self.draft_logits)
        else:
            take_drafts(pick(for_logits)[0], self, to_target)

    def _keep(self, rows: int, num_made: int) -> None:
        """Bring drafts to the requests' slots."""
        if self._steps is None or num_made == 0:
            return
        requests = self._steps.requests
        store_draft_rows(self, self._steps.most_drafts, requests.draft_tokens, rows, num_made)

    def _result(self, inputs: DraftInputs, count: int) -> Tensor:
        """Real rows; -1 where a draft was made beyond the drafter's last position."""
        rows = inputs.num_reqs
        if self.keeps_drafts:
            return self.draft_tokens[:rows, :count]
        last = inputs.positions[self.last_token_indices[:rows]]
        ahead = torch.arange(count, device=last.device)
        known = last[:, None] + ahead < self.max_position
        return torch.where(known, self.draft_tokens[:rows, :count], -1)
