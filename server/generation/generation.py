"""From prompts to a stream of text events: admission, n children, aborts, usage.

Owns a request between the routes and the engine: whatever way the reader leaves (end, error,
disconnect), no child is left running. It knows neither HTTP nor OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

from ...runner.messages import AddRequest, RequestOutput, SamplingParams
from ..errors import EngineStopped, InvalidRequest, QueueFull, outcome_of
from ..http.sse import Live, Write
from ..output.sampling import with_max_tokens
from ..request_stream import OutputStream
from ..text.choice_text import ChoiceText, GenerationEvent, TextOptions
from ..text.stop_strings import StopStrings
from .services import Services

Frame = Callable[[GenerationEvent], bytes]


@dataclass(frozen=True)
class Job:
    """What one HTTP request wants generated: every prompt `n` times."""

    request_id: str
    prompts: list[list[int]]
    sampling: SamplingParams  # of child 0 of every prompt, with max_tokens 0
    max_tokens: list[int]  # [prompts]
    text: TextOptions
    n: int = 1
    priority: int = 0
    prompt_text: str = ""  # of a chat, as the template rendered it
    cache_salt: str = ""  # requests with different ones share no cached prefix
    predicted: bool = False  # the n-gram drafter's drafts count as predicted tokens in the usage

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self.prompts) * self.n


@dataclass
class TokenCounts:
    """What a request used so far, all choices together."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


class Generation:
    """A running job: `submit`, iterate `events()`; leaving it aborts what still runs."""

    def __init__(self, services: Services, job: Job, arrived: float) -> None:
        """`arrived` is time.monotonic() when the HTTP request came."""
        self._services = services
        self.job = job
        grammar = job.sampling.grammar
        text = job.text._replace(grammar_param=grammar.param or None) if grammar else job.text
        stops = StopStrings(text.stop)
        self.choices = [
            ChoiceText(index, services.tokenizer, text, job.prompts[index // job.n], stops)
            for index in range(job.num_choices)
        ]
        self._ids = [f"{job.request_id}-{index}" for index in range(job.num_choices)]
        self._timings = [
            services.metrics.request(arrived, len(job.prompts[index // job.n]))
            for index in range(job.num_choices)
        ]
        self._streams: list[OutputStream] = []
        self._pumps: list[asyncio.Task[None]] = []

    def submit(self) -> None:
        """Hand all children to the engine, or none: QueueFull, NotReady."""
        self._admit()
        children = [self._child(index) for index in range(self.job.num_choices)]
        # `_admit` has seen an engine that is ready, and nothing was awaited since: none is refused.
        self._streams = [self._services.engine.submit(child) for child in children]
        if self._services.capture is not None:
            self._services.capture.record(self.job.prompts)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._pumps:
            task.cancel()
        self._abort(outcome_of(error))

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Events of all choices as they come; each choice's last one has a finish reason."""
        alone = self._streams[0] if len(self._streams) == 1 else None
        arriving = self._merged() if alone is None else self._one(alone)
        async for index, output in arriving:
            choice = self.choices[index]
            if choice.finish_reason is not None:
                continue  # a stop string ended it; what the engine had on its way is dropped
            # What came while the client or the event loop was slow leaves as one event.
            outputs = [output, *alone.drain()] if alone else [output]
            event = choice.feed(outputs)
            self._timings[index].tokens(event.num_read, monotonic())
            if event.finish_reason is not None:
                self._timings[index].end(event.finish_reason)
                if outputs[-1].finish_reason is None:
                    self._services.engine.abort(self._ids[index])
            yield event
            if event.finish_reason is not None and alone:
                return

    @property
    def keep_alive(self) -> float:
        """Seconds of silence after which the stream gets a comment; 0 = never."""
        return self._services.config.server.sse_keep_alive

    def live(self, frame: Frame) -> Live | None:
        """How a stream of one choice is written while its outputs arrive; None for other jobs.

        What comes without anything held up goes through `frame` straight to the client's socket;
        all else, the end included, is left to `events`.
        """
        if len(self._streams) != 1 or self.job.text.stop:
            return None
        stream, feed, count = self._streams[0], self.choices[0].feed, self._timings[0].tokens

        async def follow(write: Write) -> None:
            def take(outputs: list[RequestOutput]) -> bool:
                event = feed(outputs)
                count(event.num_read, monotonic())
                data = frame(event)
                return write(data) if data else True

            if self.choices[0].finish_reason is None:
                await stream.follow(take)

        return follow

    def counts(self) -> TokenCounts:
        """The usage so far."""
        counts = TokenCounts(prompt=sum(map(len, self.job.prompts)))
        # Drafts of other drafters come from elsewhere, whatever the client predicted.
        predicted = self.job.predicted and self._services.config.speculative.method == "ngram"
        for index, choice in enumerate(self.choices):
            counts.completion += choice.num_tokens
            if index % self.job.n == 0:  # the others find the first one's blocks
                counts.cached += choice.num_cached_tokens
            if predicted:
                counts.accepted_prediction += choice.num_accepted_tokens
                counts.rejected_prediction += choice.num_draft_tokens - choice.num_accepted_tokens
        return counts

    def _admit(self) -> None:
        config, engine = self._services.config, self._services.engine
        self._services.check_ready()
        capacity = config.scheduler.max_num_seqs + config.server.max_queue_size
        wanted = self.job.num_choices
        if wanted > capacity:
            raise InvalidRequest(
                f"The request asks for {wanted} choices; the server takes at most {capacity}.", "n"
            )
        if engine.num_open + wanted > capacity:
            raise QueueFull(engine.num_open, 1)

    def _child(self, index: int) -> AddRequest:
        job = self.job
        prompt, child = divmod(index, job.n)
        sampling = with_max_tokens(job.sampling, job.max_tokens[prompt], child)
        prompt_ids = job.prompts[prompt]
        return AddRequest(self._ids[index], prompt_ids, sampling, job.priority, job.cache_salt)

    async def _one(self, stream: OutputStream) -> AsyncIterator[tuple[int, RequestOutput]]:
        async for output in stream:
            yield 0, output
        if self.choices[0].finish_reason is None:
            raise EngineStopped("it was aborted")

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, stream: OutputStream) -> None:
            last: BaseException | None = None
            try:
                async for output in stream:
                    queue.put_nowait((index, output))
            except Exception as error:
                last = error
            queue.put_nowait((index, last))

        self._pumps = [
            asyncio.create_task(pump(index, stream)) for index, stream in enumerate(self._streams)
        ]
        running = len(self._pumps)
        while running:
            index, item = await queue.get()
            if isinstance(item, RequestOutput):
                yield index, item
                continue
            running -= 1
            if item is not None:
                raise item
            if self.choices[index].finish_reason is None:
                raise EngineStopped("it was aborted")

    def _abort(self, outcome: str | None) -> None:
        for choice, request_id, timing in zip(self.choices, self._ids, self._timings, strict=True):
            if choice.finish_reason is None:
                if outcome is not None:
                    timing.end(outcome)
                self._services.engine.abort(request_id)
