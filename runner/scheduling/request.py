"""A request on the CPU: its tokens, where it stands, and bounds of what is in flight.

The scheduler owns every instance and is the only writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..grammars.grammar import GrammarMatcher
from ..messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BIASES,
    MAX_STOP_TOKEN_IDS,
    AddRequest,
    SamplingParams,
)
from .kv_blocks import RequestBlocks
from .prefix_cache import BlockHashes


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"  # not in a slot: new, or preempted
    RUNNING = "running"  # in a slot
    FINISHED = "finished"  # forgotten; results still in flight are stale


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Two bounds frame what is unknown while steps are in flight. Each sampling row in flight emits at
    least one token and at most 1 + its drafts; so `len(token_ids) + num_sampling_in_flight` is a
    lower and `len(token_ids) + num_placeholders` an upper bound of the tokens after them.
    """

    request_id: str
    prompt_len: int
    sampling: SamplingParams
    priority: int
    arrival: int
    token_ids: list[int]  # prompt, then output; only confirmed tokens
    hashes: BlockHashes
    max_total_len: int  # prompt + output never get longer than this
    max_drafts: int | None  # its own cap per step; 0 = speculation off, None = no cap
    stops: frozenset[int] = frozenset()  # the tokens that end it
    status: RequestStatus = RequestStatus.WAITING
    is_blocked: bool = False  # its grammar is being compiled: not to be scheduled
    matcher: GrammarMatcher | None = None
    # While RUNNING:
    slot: int = -1
    incarnation: int = 0  # grows when it leaves its slot: results of an older one are stale
    prefill_len: int = 0  # tokens known when it entered the slot
    num_prefilled: int = 0  # of those, scheduled or found in the prefix cache
    num_confirmed_tokens: int = 0  # tokens whose KV, the drafter's too, is surely there and valid
    num_chunks_in_flight: int = 0  # rows that do not sample
    num_sampling_in_flight: int = 0  # and those that do
    num_placeholders: int = 0  # tokens that they may emit
    num_rests: int = 0  # steps since its last row that left it out for the sake of others
    blocks: RequestBlocks | None = None
    # For its outputs:
    num_cached_tokens: int | None = None  # of the first admission
    num_counted_prompt_tokens: int = 0  # prompt tokens already in the statistics
    has_emitted: bool = False
    prompt_logprobs: list[bytes] = field(default_factory=list)  # as far as they are computed

    @classmethod
    def from_message(cls, message: AddRequest, arrival: int, max_model_len: int) -> Request:
        """A new request as it arrives."""
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
        """Sort key: smaller runs first and is preempted last."""
        return self.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Upper bound of the known tokens once every step in flight has landed."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens remain to be scheduled before it can decode."""
        return self.num_prefilled < self.prefill_len

    @property
    def num_computed_tokens(self) -> int:
        """Upper bound, steps in flight included. Once it decodes, the newest token alone is not
        computed."""
        return self.num_prefilled if self.is_prefilling else self.max_len - 1

    @property
    def num_rows_in_flight(self) -> int:
        """Its rows in steps that have not landed."""
        return self.num_chunks_in_flight + self.num_sampling_in_flight

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's logprobs are asked for and not yet delivered."""
        return self.sampling.prompt_logprobs is not None and not self.has_emitted

    def why_impossible(self, max_model_len: int) -> str | None:
        """Why it can never run, as a sentence for its client; None if it can."""
        if not self.prompt_len:
            return "The prompt has no tokens."
        if self.prompt_len >= max_model_len:
            return (
                f"The prompt has {self.prompt_len} tokens; with one token of output that is "
                f"more than max_model_len {max_model_len}."
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
                return f"{name} has {count} tokens; at most {limit} are possible."
        return None
