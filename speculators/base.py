"""The interface of drafters, and the data that they draft from. It does not know the runner.

A speculator is tensor code that never waits for the device. The runner provides a `DraftHost` once
and `DraftInputs` in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..configs.graphs import BatchExecutionDescriptor, StepMode
from ..configs.options import ConfigError
from ..configs.schema import SpeculativeConfig
from ..kernels.drafts.draw_drafts import draw_drafts, take_drafts
from ..kernels.drafts.stage_drafts import store_draft_rows
from .draft_head import DraftModel

MAX_DRAFT_LOGITS_BYTES = 1 << 30  # above this, `draft_sampling: auto` drafts greedily


@dataclass(frozen=True)
class SpeculatorNeeds:
    """What the runner must provide for a drafter; it never tests the name of the method."""

    num_speculative_tokens: int  # K: verified rows per request are at most K + 1
    num_lookahead_tokens: int = 0  # KV slots beyond the target's tokens, for drafts' KV
    aux_hidden_state_boundaries: tuple[int, ...] = ()  # boundary b = residual stream after b layers
    hidden_states: bool = False  # the target's hidden states after the final norm
    draft_logits: bool = False  # store q per slot, for probabilistic verification
    max_deferred_tokens: int = 0  # tokens of a request that its own state may lag; 0 = no state
    per_request_drafts: bool = False  # rows without drafts are free, so K may differ by request
    watched: bool = True  # low acceptance indicates a fault (not so for n-grams)
    kv_needs_next_token: bool = False  # its KV at a position also depends on the token after it


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
    """A step of the target for its drafter: N* rows, M* tokens; padded rows have slot -1."""

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
    attention: Any = None  # the target's AttentionState; None in a WHOLE step, whose graph built it
    hidden_states: Tensor | None = None  # [M, H] after the final norm
    aux_hidden_states: Tensor | None = None  # [M, boundaries * H], side by side
    num_drafts: int | None = None  # how many to make; None = K; 0 = only process the step
    num_decode_reqs: int = 0  # least number of rows of each draft decode: the most of any rank
    num_deferred: Sequence[int] = ()  # [N] on the host: tokens before the row that were deferred
    mode: StepMode = StepMode.EAGER  # how the target's step ran
    all_greedy: bool = False  # True if the host knows that no request samples


class DraftHost(Protocol):
    """The runner as a drafter sees it. A drafter may keep it and use it in every step.

    It may call `load_draft_model` only in its constructor.
    """

    device: torch.device
    dtype: torch.dtype
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    vocab_size: int
    target_model: nn.Module

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> Any:
        """Build the draft architecture `kind`, load its weights and register its attention layers.

        If the checkpoint has no embeddings or no output head, the target's are used. Returns a
        `DraftModel`. For the kind "draft_model" it is a whole language model, of an architecture
        that the runner also serves as a target.
        """

    def upload(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy a host array of int32 or int64 to the device, into `out` if given.

        The call does not wait for the device.
        """


class BaseSpeculator(ABC):
    """A drafter.

    A subclass either implements `propose`, or is an `AutoRegressiveSpeculator`: then the runner
    calls its passes one by one, and records them in CUDA graphs.
    """

    needs: SpeculatorNeeds

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Return drafts for every row, [N, up to K] int64, -1 where there is none.

        Must not wait for the device.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement propose()")

    def defer(self, inputs: DraftInputs) -> None:
        """Take note of a step after which no drafts are wanted; called instead of `propose`.

        In such a step every row has one token and verifies no draft. A drafter with a state of its
        own (`needs.max_deferred_tokens`) keeps what it needs to process these tokens later.
        """
        return


class DraftModelSpeculator(BaseSpeculator):
    """A drafter with a model: loads it, owns the buffers that graphs read, draws drafts.

    Buffers are indexed by batch row [R] or token row [T]. Every call fills their padded rows too.
    """

    _all_greedy = False  # no row of the buffers samples; False while graphs are captured

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        self.config = config
        self.host = host
        self.num_drafts = config.max_drafts  # K
        self.model: DraftModel = self.load_draft_model()
        if not hasattr(self.model, "run"):
            raise ConfigError(
                f"{type(self.model).__name__} is not a draft model: derive it from "
                "slipstream.speculators.draft_head.DraftHead and define forward, compute_logits, "
                "input_width and feedback_width"
            )
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
        self.step = zeros(reqs)  # [R] which draft is made next; on the device, as graphs count it
        self._requests: RequestRows | None = None

    @abstractmethod
    def load_draft_model(self) -> DraftModel:
        """Load the drafter's model through `self.host`, which also shares the target's weights."""

    def use_requests(self, requests: RequestRows) -> None:
        """Called once before the first pass: these are the requests of all steps."""
        self._requests = requests

    @property
    def probabilistic(self) -> bool:
        """Whether drafts are drawn from the drafter's distribution, or are its likeliest tokens.

        With `draft_sampling: auto` they are drawn if the logits of all drafts fit in
        MAX_DRAFT_LOGITS_BYTES.
        """
        if self.config.draft_sampling != "auto":
            return self.config.draft_sampling == "probabilistic"
        size = self.host.max_num_reqs * self.num_drafts * self.host.vocab_size * 4
        return size <= MAX_DRAFT_LOGITS_BYTES

    @property
    def draft_logits(self) -> Tensor | None:
        """Scaled logits of the drafts, [R, K, V] float32 by slot; None = drafts are the likeliest
        tokens."""
        return None if self._requests is None else self._requests.draft_logits

    def draw_drafts(self, for_logits: Tensor) -> None:
        """Draw the next draft of each row from the hidden states [N*, .] that the head reads.

        Logits are not written where the model picks tokens itself and verification does not need
        their distribution. The noise is salted: verification uses other noise.
        """
        model, kept = self.model, self.draft_logits
        if kept is not None and self._all_greedy:  # rows without a distribution need no noise
            logits = model.compute_logits(for_logits)  # as for drawn drafts: no kernel more
            if model.draft_to_target is None:
                logits = logits[:, : kept.shape[2]]
            take_drafts(logits.argmax(dim=-1), self, model.draft_to_target)
        elif model.pick_tokens is None or kept is not None:
            draw_drafts(model.compute_logits(for_logits), self, model.draft_to_target, kept)
        else:
            take_drafts(model.pick_tokens(for_logits)[0], self, model.draft_to_target)

    def store_drafts(self, most_drafts: Tensor, num_reqs: int, num_made: int) -> None:
        """Copy drafts to the request table, -1 beyond what the request and the step allow.

        most_drafts: [>= num_reqs] int32 by batch row, the limit of the step.
        """
        assert self._requests is not None
        if num_made:
            table = self._requests.draft_tokens
            store_draft_rows(self, most_drafts, table, num_reqs, num_made)
