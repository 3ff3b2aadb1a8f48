"""A request as the scheduler sees it: its tokens, its state, and bounds on what is in flight.

The scheduler owns every instance, and only it and the functions that it calls write to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..grammars.grammar import GrammarMatcher
from ..messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BIASES,
    MAX_STOP_TOKEN_IDS,
    AddRequest,
    SamplingParams,
)
from .kv_blocks import RequestBlocks
from .plan import NewRequest, ScheduledRow
from .prefix_cache import BlockHashes


class RequestStatus(Enum):
    WAITING = "waiting"  # has no slot: it is new, or was preempted
    RUNNING = "running"  # has a slot
    FINISHED = "finished"  # removed; results still in flight are stale


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    While steps are in flight, the number of tokens is known only within bounds. Each sampling row
    in flight emits between one and 1 + its drafts tokens. Once all have landed, there will be at
    least `len(token_ids) + num_sampling_in_flight` tokens and at most
    `len(token_ids) + num_placeholders`.
    """

    request_id: str
    prompt_len: int
    sampling: SamplingParams
    priority: int
    arrival: int
    token_ids: list[int]  # prompt, then confirmed output
    hashes: BlockHashes
    max_total_len: int  # limit on prompt + output tokens
    max_drafts: int | None  # its own limit on drafts per step; 0 = no speculation, None = no limit
    stops: frozenset[int] = frozenset()  # the tokens that end its output
    status: RequestStatus = RequestStatus.WAITING
    is_blocked: bool = False  # not schedulable until its grammar is compiled
    matcher: GrammarMatcher | None = None
    mask_lines: np.ndarray | None = None  # its last masks, [drafts + 1, ceil(V / 32)] int32
    # While RUNNING:
    slot: int = -1
    incarnation: int = 0  # increases when it leaves its slot; results of an older one are stale
    prefill_len: int = 0  # number of tokens known when it entered the slot
    num_prefilled: int = 0  # how many of them are scheduled or came from the prefix cache
    num_confirmed_tokens: int = 0  # tokens with valid KV, the drafter's included
    num_chunks_in_flight: int = 0  # rows in flight that do not sample
    num_sampling_in_flight: int = 0  # rows in flight that sample
    num_placeholders: int = 0  # most tokens that those rows can emit
    num_rests: int = 0  # consecutive steps that skipped it; see `StepTimes`
    blocks: RequestBlocks | None = None
    # For its outputs:
    num_cached_tokens: int | None = None  # prefix-cache hits at its first admission
    num_counted_prompt_tokens: int = 0  # prompt tokens already in the statistics
    has_emitted: bool = False
    prompt_logprobs: list[bytes] = field(default_factory=list)  # those computed so far, packed

    @classmethod
    def from_message(cls, message: AddRequest, arrival: int, max_model_len: int) -> Request:
        """Create a request from the server's message."""
        token_ids = list(message.prompt_token_ids)
        sampling = message.sampling
        return cls(
            request_id=message.request_id,
            prompt_len=len(token_ids),
            sampling=sampling,
            priority=message.priority,
            arrival=arrival,
            token_ids=token_ids,
            hashes=BlockHashes(token_ids, message.cache_salt.encode()),
            max_total_len=min(len(token_ids) + sampling.max_tokens, max_model_len),
            max_drafts=sampling.speculative_max_tokens if sampling.speculative_enabled else 0,
            stops=frozenset(sampling.stop_token_ids),
            is_blocked=sampling.grammar is not None,
        )

    @property
    def order(self) -> tuple[int, int]:
        """Sort key. The smallest runs first and is preempted last."""
        return self.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        """Number of confirmed output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Upper bound of the number of tokens once every step in flight has landed."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def is_prefilling(self) -> bool:
        """True while known tokens must still be scheduled before it can decode."""
        return self.num_prefilled < self.prefill_len

    @property
    def num_computed_tokens(self) -> int:
        """Upper bound of the tokens with KV once the steps in flight have landed.

        While it decodes, all tokens but the newest have KV.
        """
        return self.num_prefilled if self.is_prefilling else self.max_len - 1

    def enter(self, slot: int, num_cached: int) -> None:
        """Enter a slot; the prefix cache holds `num_cached` of the known tokens."""
        self.status, self.slot = RequestStatus.RUNNING, slot
        self.prefill_len = len(self.token_ids)
        self.num_prefilled = self.num_confirmed_tokens = num_cached

    def new_request(self, snapshot: int) -> NewRequest:
        """Its description for the model runner, in the step in which it enters its slot.

        `snapshot`: the block of the recurrent state from which it continues; 0 = none.
        """
        assert self.blocks is not None
        return NewRequest(
            slot=self.slot,
            token_ids=list(self.token_ids),
            prompt_len=self.prompt_len,
            num_computed_tokens=self.num_confirmed_tokens,
            block_ids=[list(table) for table in self.blocks.tables],
            sampling=self.sampling,
            snapshot=snapshot,
        )

    def wait_again(self) -> None:
        """Return to the waiting state, without a slot and without KV."""
        self.status = RequestStatus.WAITING
        self.num_prefilled = self.num_confirmed_tokens = self.num_placeholders = 0
        self.num_chunks_in_flight = self.num_sampling_in_flight = 0
        if not self.has_emitted:
            self.prompt_logprobs.clear()

    def begin(self, row: ScheduledRow) -> None:
        """Move the bounds by a row that a step is about to compute."""
        if self.num_prefilled < self.prefill_len:
            self.num_prefilled += row.num_tokens
        if row.is_prefill:
            self.num_chunks_in_flight += 1
        else:
            self.num_sampling_in_flight += 1
            self.num_placeholders += row.num_draft_tokens + 1

    @property
    def num_rows_in_flight(self) -> int:
        """Number of its rows in steps that have not landed."""
        return self.num_chunks_in_flight + self.num_sampling_in_flight

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the client wants the prompt's log probabilities and has not got them yet."""
        return self.sampling.prompt_logprobs is not None and not self.has_emitted

    def why_impossible(self, max_model_len: int) -> str | None:
        """A sentence for the client that says why the request can never run; None if it can."""
        if not self.prompt_len:
            return "The prompt has no tokens."
        if self.prompt_len >= max_model_len:
            return (
                f"The prompt has {self.prompt_len} tokens, which leaves no room for output: "
                f"max_model_len is {max_model_len}."
            )
        if self.sampling.max_tokens < 1:
            return "max_tokens must be at least 1."
        sampling = self.sampling
        for name, count, limit in (
            ("logit_bias", len(sampling.logit_bias), MAX_BIASES),
            ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS),
            ("bad_words", sum(map(len, sampling.bad_words_token_ids)), MAX_BAD_WORD_TOKENS),
            ("prediction", len(sampling.prediction_token_ids), max_model_len),
        ):
            if count > limit:
                return f"{name} has {count} tokens, but the limit is {limit}."
        return None
