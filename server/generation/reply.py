"""The shapes of a reply that `respond` fills: a whole reply, or the pieces of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UnsetType

from ..errors import APIError, error_body
from ..http.sse import DONE, MAX_SILENT_TOKENS, event
from ..off_loop import logprobs_size
from ..openai_types.common import GenerationBody
from ..openai_types.replies import (
    ChatChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    ReplyMetrics,
    Usage,
    encode,
)
from ..text.choice_text import GenerationEvent, TokenEntry
from .generation import Generation
from .large_replies import encode_in_pieces
from .services import Services
from .usage import reply_metrics, usage

PLACE = secrets.token_hex(16)  # in place of a chunk's text; in no client's id or model name


@dataclass
class Collected:
    """All events of one choice put together."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] = field(default_factory=list)
    prompt_logprobs: list[bytes] | None = None  # packed
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, item: GenerationEvent) -> None:
        """Add the next event."""
        self.texts.append(item.text)
        self.token_ids += item.token_ids
        self.logprobs += item.logprobs
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        self.finish_reason, self.stop_reason = item.finish_reason, item.stop_reason


class Whole(ABC):
    """A reply that is sent once everything is there."""

    def __init__(self, num_choices: int) -> None:
        self.parts = [Collected() for _ in range(num_choices)]

    def add(self, item: GenerationEvent) -> None:
        """Take the next event."""
        self.parts[item.index].add(item)

    def size(self) -> int:
        """About how many bytes of log probabilities `answer` encodes."""
        of_prompts = [piece for part in self.parts for piece in part.prompt_logprobs or ()]
        return logprobs_size(of_prompts, *(part.logprobs for part in self.parts))

    @abstractmethod
    def answer(self) -> Any:
        """The reply, after the last event."""


class Framer(ABC):
    """A reply that is sent as a stream; each piece is one or more server-sent events."""

    def first(self) -> bytes:
        """The piece before any token, if there is one."""
        return b""

    def size(self, item: GenerationEvent) -> int:
        """About how many bytes of log probabilities `delta` encodes for this event, if many."""
        return 0

    @abstractmethod
    def delta(self, item: GenerationEvent) -> bytes:
        """The piece for an event; empty if there is nothing to show."""

    @abstractmethod
    def last(self) -> bytes:
        """The piece after the last event."""

    def failed(self, error: APIError) -> bytes:
        """The piece that ends the stream if it cannot go on."""
        return event(error_body(error))


class Reply:
    """What a whole reply and a stream of OpenAI's chunks both carry."""

    def __init__(self, services: Services, body: GenerationBody, generation: Generation) -> None:
        self.services = services
        self.options = body
        self.generation = generation
        self.job = generation.job
        # The first fields of a reply and of each chunk: id, time, model, fingerprint.
        self.head = (self.job.request_id, int(time.time()), body.model, services.fingerprint)

    def usage(self) -> Usage:
        """The token counts so far."""
        return usage(self.generation.counts(), self.num_reasoning_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens of reasoning so far."""
        return 0

    def metrics(self) -> ReplyMetrics | UnsetType:
        """What became of the drafts; unset unless it was asked for."""
        return reply_metrics(self.services, self.options.speculative, self.generation.choices)


@dataclass(slots=True)
class StreamedChoice:
    """What a stream has shown of one choice."""

    began: bool = False
    num_silent: int = 0  # tokens since the last chunk
    around: tuple[bytes, bytes] | None = None  # the text of a chunk that has nothing else

    def is_overdue(self, num_tokens: int, shown: bool) -> bool:
        """Count tokens; true if an empty chunk must show that they come, though without text."""
        self.num_silent = 0 if shown else self.num_silent + num_tokens
        if self.num_silent < MAX_SILENT_TOKENS:
            return False
        self.num_silent = 0
        return True


class ChunkFramer(Framer):
    """Frames OpenAI's chunks. What is around the text of a chunk is encoded once for each choice.

    It is cut out of a chunk that was encoded as usual, so both are the same bytes by construction.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._streamed = [StreamedChoice() for _ in range(reply.job.num_choices)]
        options = reply.options
        self._only_text_changes = not (options.return_token_ids or options.wants_running_usage)

    @abstractmethod
    def chunk(self, choices: list[Any]) -> ChatChunk | Completion:
        """A chunk with these choices."""

    @abstractmethod
    def choices(
        self, item: GenerationEvent, streamed: StreamedChoice
    ) -> Sequence[ChunkChoice | CompletionChoice]:
        """What each chunk for an event holds."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> ChunkChoice | CompletionChoice | None:
        """What a chunk of text and nothing else holds; None if there is more to tell."""

    def delta(self, item: GenerationEvent) -> bytes:
        """One chunk or more. All that came with an event is sent at once: see `EventStream`."""
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
        """The usage, if it is wanted, and the end."""
        if not self._reply.options.wants_usage:
            return DONE
        chunk = self.chunk([])
        chunk.usage, chunk.metrics = self._reply.usage(), self._reply.metrics()
        return event(encode(chunk)) + DONE

    def framed(
        self, chunk: ChatChunk | Completion, encoder: Callable[[Any], bytes] = encode
    ) -> bytes:
        """The chunk as an event, with the usage so far if that is wanted."""
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
