"""Base classes of the endpoints' replies: whole replies and framers of streams.

`respond` passes them the events of a generation.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from ..errors import APIError, InvalidRequest, error_body
from ..http.sse import DONE, MAX_SILENT_TOKENS, event
from ..off_loop import logprobs_size
from ..openai_types.common import GenerationBody, Speculative
from ..openai_types.replies import (
    ChatChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    ReplyMetrics,
    SpeculativeMetrics,
    SpeculativeStep,
    Usage,
    encode,
)
from ..text.choice_text import ChoiceText, GenerationEvent, StepText, TokenEntry
from .generation import Generation, TokenCounts
from .large_replies import encode_in_pieces
from .services import Services

# Log probabilities in a whole reply, which the server holds until its end. They suffice for 20
# alternatives to each of 131,072 tokens.
MAX_LOGPROBS = 1 << 22
PLACE = secrets.token_hex(16)  # placeholder for the text; random, so that it occurs nowhere else


@dataclass
class Collected:
    """All events of one choice, joined."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] = field(default_factory=list)
    prompt_logprobs: list[bytes] | None = None  # packed
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, item: GenerationEvent) -> None:
        self.texts.append(item.text)
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        self.finish_reason, self.stop_reason = item.finish_reason, item.stop_reason


class Whole(ABC):
    """Collects events for a reply that is sent as one JSON object."""

    def __init__(self, num_choices: int) -> None:
        self.parts = [Collected() for _ in range(num_choices)]
        self._num_logprobs = 0

    def add(self, item: GenerationEvent) -> None:
        """Take the next event; InvalidRequest once the reply holds too many log probabilities."""
        self.parts[item.index].add(item)
        if item.logprobs:
            self._num_logprobs += sum(1 + len(entry.logprobs.top_ids) for entry in item.logprobs)
            if self._num_logprobs > MAX_LOGPROBS:
                raise InvalidRequest(
                    f"The reply holds more than {MAX_LOGPROBS} log probabilities. Stream it, or "
                    "ask for fewer tokens, choices or alternatives.",
                    "logprobs",
                )

    def size(self) -> int:
        """The approximate size in bytes of the log probabilities in the reply."""
        of_prompts = [piece for part in self.parts for piece in part.prompt_logprobs or ()]
        return logprobs_size(of_prompts, *(part.logprobs for part in self.parts))

    @abstractmethod
    def answer(self) -> Any:
        """The reply object; called after the last event."""


class Framer(ABC):
    """Frames a reply as a stream of pieces, each of which is one or more server-sent events."""

    def first(self) -> bytes:
        """The piece to send before any token; may be empty."""
        return b""

    def size(self, item: GenerationEvent) -> int:
        """The approximate size in bytes of `delta(item)` if it may be large, else 0."""
        return 0

    @abstractmethod
    def delta(self, item: GenerationEvent) -> bytes:
        """The piece for an event; empty if there is nothing to send yet."""

    @abstractmethod
    def last(self) -> bytes:
        """The piece to send after the last event."""

    def failed(self, error: APIError) -> bytes:
        """The last piece of a stream that ends with an error."""
        return event(error_body(error))


class Reply:
    """The contents that whole replies and streams of a request share."""

    def __init__(self, services: Services, body: GenerationBody, generation: Generation) -> None:
        self.services = services
        self.options = body
        self.generation = generation
        self.job = generation.job
        # The first fields of a reply and of each chunk: id, created, model, system_fingerprint.
        self.head = (self.job.request_id, int(time.time()), body.model, services.fingerprint)

    def usage(self) -> Usage:
        return usage(self.generation.counts(), self.num_reasoning_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return 0

    def steps(self, steps: Sequence[StepText]) -> list[SpeculativeStep]:
        """The steps of an event with the text of rejected drafts."""
        tokenizer = self.services.tokenizer

        def text(token_id: int) -> str:
            return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

        return [SpeculativeStep(texts, n, [*map(text, ids)]) for texts, n, ids in steps]

    def metrics(self) -> ReplyMetrics | UnsetType:
        """The speculation metrics; UNSET unless requested."""
        return reply_metrics(self.services, self.options.speculative, self.generation.choices)


@dataclass(slots=True)
class StreamedChoice:
    """The state of one choice in a stream."""

    began: bool = False  # its first content was framed; what follows may be text alone
    num_silent: int = 0  # tokens since the last chunk
    around: tuple[bytes, bytes] | None = None  # bytes before and after a chunk's text

    def is_overdue(self, num_tokens: int, shown: bool) -> bool:
        """Count tokens that have arrived; True if an empty chunk must be sent as a sign of life.

        `shown` means that a chunk is sent for these tokens anyway.
        """
        self.num_silent = 0 if shown else self.num_silent + num_tokens
        if self.num_silent < MAX_SILENT_TOKENS:
            return False
        self.num_silent = 0
        return True


class ChunkFramer(Framer):
    """Frames a stream of OpenAI's chunks.

    Most chunks of a choice differ only in their text, so the bytes around the text are encoded once
    and reused. They are cut from a chunk with a placeholder, so reuse cannot change the encoding.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._streamed = [StreamedChoice() for _ in range(reply.job.num_choices)]
        options = reply.options
        self._only_text_changes = not (
            options.return_token_ids or options.wants_running_usage or options.wants_steps
        )

    @abstractmethod
    def chunk(self, choices: list[Any]) -> ChatChunk | Completion:
        """A chunk that contains these choices."""

    @abstractmethod
    def choices(
        self, item: GenerationEvent, streamed: StreamedChoice
    ) -> Sequence[ChunkChoice | CompletionChoice]:
        """The choices to send now that this event has arrived, one per chunk; may be empty.

        They may include earlier events that were held back. `streamed` is the state of the event's
        choice; an implementation sets `began` at the first content of each choice.
        """

    @abstractmethod
    def text_choice(self, index: int, text: str) -> ChunkChoice | CompletionChoice | None:
        """The choice of a text-only chunk; None if this choice's chunks hold more than text."""

    def delta(self, item: GenerationEvent) -> bytes:
        streamed = self._streamed[item.index]
        around, text = streamed.around, item.text
        if around is not None and text and not (item.finish_reason or item.logprobs):
            streamed.num_silent = 0
            return around[0] + encode(text) + around[1]
        # The first chunk of a choice may echo a long prompt.
        encoder = encode if streamed.began else encode_in_pieces
        choices = self.choices(item, streamed)
        if around is None and streamed.began and self._only_text_changes:
            streamed.around = self._around(item.index)
        return b"".join([self.framed(self.chunk([choice]), encoder) for choice in choices])

    def last(self) -> bytes:
        if not self._reply.options.wants_usage:
            return DONE
        chunk = self.chunk([])
        chunk.usage, chunk.metrics = self._reply.usage(), self._reply.metrics()
        return event(encode(chunk)) + DONE

    def framed(
        self, chunk: ChatChunk | Completion, encoder: Callable[[Any], bytes] = encode
    ) -> bytes:
        """The chunk as a server-sent event, with the usage so far if requested."""
        options = self._reply.options
        if options.wants_usage:
            chunk.usage = self._reply.usage() if options.wants_running_usage else None
        return event(encoder(chunk))

    def _around(self, index: int) -> tuple[bytes, bytes] | None:
        choice = self.text_choice(index, PLACE)
        if choice is None:
            return None
        before, after = self.framed(self.chunk([choice])).split(encode(PLACE))
        return before, after


def usage(counts: TokenCounts, reasoning_tokens: int = 0) -> Usage:
    """The usage object of a request: all choices together, each prompt counted once."""
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(counts.cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=reasoning_tokens,
            accepted_prediction_tokens=counts.accepted_prediction,
            rejected_prediction_tokens=counts.rejected_prediction,
        ),
    )


def reply_metrics(
    services: Services, requested: Speculative | None, choices: Sequence[ChoiceText]
) -> ReplyMetrics | UnsetType:
    """The speculation metrics of a reply; UNSET if not requested or without a drafter.

    `requested` overrides the server's --per-request-spec-decode-metrics.
    """
    level = services.config.server.per_request_spec_decode_metrics
    if requested is not None and requested.metrics is not None:
        level = requested.metrics
    most = services.engine.ready.num_speculative_tokens
    if level == "none" or not most:
        return UNSET
    steps = [step for choice in choices for step in choice.spec_steps]
    return ReplyMetrics(speculative_metrics(steps, most, level == "detailed"))


def speculative_metrics(
    steps: Sequence[tuple[int, int]], most: int, detailed: bool = False
) -> SpeculativeMetrics:
    """The metrics of the (accepted, drafted) pairs of all verification steps.

    `most` is the maximum draft length K. `detailed` adds the pairs themselves.
    """
    histogram = [0] * (most + 1)
    by_length: dict[int, list[int]] = {}
    for accepted, drafted in steps:
        histogram[accepted] += 1
        by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    num_accepted, num_drafted = (sum(step[column] for step in steps) for column in (0, 1))
    metrics = SpeculativeMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length={str(k): by_length[k] for k in sorted(by_length)},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=most,
    )
    if detailed:
        metrics.per_step_accepted = [accepted for accepted, _ in steps]
        metrics.per_step_drafted = [drafted for _, drafted in steps]
    return metrics
