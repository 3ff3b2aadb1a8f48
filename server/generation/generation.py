"""Runs a job on the engine: admission, one engine request per choice, text events, usage, aborts.

However the reader leaves (end, error, disconnect), no engine request is left running. This module
knows neither HTTP nor the shapes of OpenAI's replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic

from ...runner.messages import AddRequest, RequestOutput, SamplingParams
from ..errors import EngineStopped, InvalidRequest, QueueFull, outcome_of
from ..http.sse import Live, Write
from ..output.sampling import with_max_tokens
from ..request_stream import RequestStream
from ..text.choice_text import ChoiceText, GenerationEvent, TextOptions
from ..text.stop_strings import StopStrings
from .services import Services

Frame = Callable[[GenerationEvent], bytes]


@dataclass(frozen=True)
class Job:
    """The work of one HTTP request: `n` choices for every prompt."""

    request_id: str
    prompts: list[list[int]]
    sampling: SamplingParams  # for choice 0 of a prompt; max_tokens is still 0
    max_tokens: list[int]  # [prompts]
    text: TextOptions
    n: int = 1
    priority: int = 0
    prompt_text: str = ""  # a chat as rendered by the template; empty for completions
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    predicted: bool = False  # the n-gram drafter's drafts count as predicted tokens in the usage

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass
class TokenCounts:
    """The tokens that a request used so far, summed over its choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


class Generation:
    """A running job: call `submit`, then iterate `events()`.

    It is a context manager: leaving it aborts every choice that has not finished.
    """

    def __init__(self, services: Services, job: Job, arrived: float) -> None:
        """`arrived` is time.monotonic() at the arrival of the HTTP request."""
        self._services = services
        # Seconds of silence after which a stream gets a comment; 0 = never.
        self.keep_alive = services.config.server.sse_keep_alive
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
        self._streams: list[RequestStream] = []
        self._pumps: list[asyncio.Task[None]] = []

    def submit(self) -> None:
        """Submit all choices to the engine, or none of them.

        Raises InvalidRequest, QueueFull, NotReady.
        """
        self._admit()
        children = [self._child(index) for index in range(self.job.num_choices)]
        # `_admit` found the engine ready and nothing was awaited since, so none can be refused.
        self._streams = [self._services.engine.submit(child) for child in children]
        self._services.metrics.assign(self._timings, self._streams)
        if self._services.capture is not None:
            self._services.capture.record(self.job.prompts)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        for task in self._pumps:
            task.cancel()
        self._abort(outcome_of(error))

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of all choices in order of arrival.

        The last event of each choice has a finish reason. Raises EngineDead, EngineStopped,
        GenerationFailed, or InvalidRequest if the engine refuses the request.
        """
        alone = self._streams[0] if len(self._streams) == 1 else None
        arriving = self._merged() if alone is None else self._one(alone)
        async for index, output in arriving:
            choice = self.choices[index]
            if choice.finish_reason is not None:
                continue  # a stop string ended this choice; drop outputs that were on their way
            # Outputs that piled up while the client or the event loop was slow become one event.
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

    def live(self, frame: Frame) -> Live | None:
        """A function that writes a stream of one choice as its outputs arrive; None for other jobs.

        While the client keeps up, each event is framed and written directly to its socket. The
        rest, including the end, is left to `events`.
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
        counts = TokenCounts(prompt=sum(map(len, self.job.prompts)))
        # Only the n-gram drafter uses the client's prediction.
        predicted = self.job.predicted and self._services.config.speculative.method == "ngram"
        for index, choice in enumerate(self.choices):
            counts.completion += choice.num_tokens
            if index % self.job.n == 0:  # its siblings find the KV blocks of choice 0
                counts.cached += choice.num_cached_tokens
            if predicted:
                counts.accepted_prediction += choice.num_accepted_tokens
                counts.rejected_prediction += choice.num_draft_tokens - choice.num_accepted_tokens
        return counts

    def _admit(self) -> None:
        config, engine = self._services.config, self._services.engine
        self._services.check_ready()
        capacity = engine.ready.max_num_seqs + config.server.max_queue_size
        wanted = self.job.num_choices
        if wanted > capacity:
            raise InvalidRequest(
                f"The request asks for {wanted} choices; the server accepts at most {capacity}.",
                "n",
            )
        if engine.num_open + wanted > capacity:
            raise QueueFull(engine.num_open, 1)

    def _child(self, index: int) -> AddRequest:
        job = self.job
        prompt, child = divmod(index, job.n)
        sampling = with_max_tokens(job.sampling, job.max_tokens[prompt], child)
        prompt_ids = job.prompts[prompt]
        return AddRequest(self._ids[index], prompt_ids, sampling, job.priority, job.cache_salt)

    async def _one(self, stream: RequestStream) -> AsyncIterator[tuple[int, RequestOutput]]:
        async for output in stream:
            yield 0, output
        if self.choices[0].finish_reason is None:
            raise EngineStopped("it was aborted")

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
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
