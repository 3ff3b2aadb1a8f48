"""POST /v1/completions: parse, generate, answer whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from ...runner.messages import unpack_logprobs
from ..errors import InvalidRequest
from ..generation.chunk_template import PLACE, ChunkTemplate
from ..generation.generation import Generation, Job
from ..generation.large_replies import encode_in_pieces
from ..generation.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from ..generation.prompt_ids import Fit, room, tokenize, truncated
from ..generation.respond import respond
from ..generation.services import Services
from ..generation.usage import reply_metrics, usage
from ..http.sse import DONE, MAX_SILENT_TOKENS, Live, Write, event
from ..off_loop import by_size, logprobs_size
from ..openai_types.completions import CompletionRequest
from ..openai_types.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    ReplyMetrics,
    encode,
)
from ..output.sampling import (
    ModelLimits,
    check_prompt_logprobs,
    check_token_ids,
    sampling_params,
)
from ..text.choice_text import GenerationEvent, TextOptions, TokenEntry

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completion_routes(services: Services) -> APIRouter:
    """The route of completions."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        arrived = time.monotonic()
        body = await services.bodies.read(request, CompletionRequest)
        reply = _Reply(services, body, await _prepare(services, body))
        return await respond(
            request,
            Generation(services, reply.job, arrived),
            reply,
            stream=bool(body.stream),
            wait=reply.job.sampling.grammar is not None,
        )

    return router


async def _prepare(services: Services, body: CompletionRequest) -> Job:
    """Everything that can be refused before the engine hears of it."""
    services.check_model(body.model)
    services.check_ready()
    limits = ModelLimits.of(
        services.engine.ready, services.tokenizer, services.config.model.max_logprobs
    )
    n, best_of = body.n or 1, body.best_of or body.n or 1
    _check(body, n, best_of)
    logprobs = body.logprobs
    params = partial(sampling_params, logprobs=0 if logprobs is None and best_of > n else logprobs)
    size = body.analysis_bytes
    sampling = await by_size(size, params, body, limits, services.tokenizer, services.seeds)
    if body.echo and logprobs is not None:
        wanted = max(logprobs, body.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=wanted)
    wanted = max(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, 1)
    fit = Fit(limits.max_model_len, "prompt", body.truncate_prompt_tokens, wanted)
    prompts = await _prompt_ids(services, body, limits, fit)
    param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_logprobs(sampling, n * sum(map(len, prompts)), limits, param)
    rooms = [room(ids, fit) for ids in prompts]
    return Job(
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=prompts,
        sampling=sampling,
        max_tokens=rooms,
        text=TextOptions(
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
        ),
        n=best_of,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        predicted=body.prediction is not None,
    )


def _check(body: CompletionRequest, n: int, best_of: int) -> None:
    wrong: tuple[str, str] | None = None
    if body.suffix:
        wrong = "suffix", "this model cannot fill in the middle"
    elif best_of < n:
        wrong = "best_of", f"it must be at least n ({n})"
    elif best_of > n and body.stream:
        wrong = "best_of", "a stream cannot choose the best of several"
    elif body.max_tokens == 0 and not body.echo:
        wrong = "max_tokens", "it must be at least 1 unless 'echo' is set"
    if wrong:
        raise InvalidRequest(
            f"Invalid value for '{wrong[0]}': {wrong[1]}.", wrong[0], "invalid_value"
        )


async def _prompt_ids(
    services: Services, body: CompletionRequest, limits: ModelLimits, fit: Fit
) -> list[list[int]]:
    prompts = body.prompts
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    if texts:
        ids = await tokenize(services, texts, body.add_special_tokens is not False, fit)

    def checked() -> list[list[int]]:
        for prompt in ids:
            check_token_ids(prompt, limits.vocab_size, "prompt")
        return [truncated(prompt, fit) for prompt in ids]

    return await by_size(body.num_bytes, checked)


@dataclass
class _Whole:
    """One choice as far as it has come."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    prompt: list[bytes] | None = None  # log probabilities, packed
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: GenerationEvent) -> None:
        self.text.append(event.text)
        self.token_ids += event.token_ids
        self.entries += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt = event.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason


class _Reply:
    """Turns events into OpenAI's shapes."""

    def __init__(self, services: Services, body: CompletionRequest, job: Job) -> None:
        self.job = job
        self._services = services
        self._body = body
        self._n = body.n or 1
        self._skip = body.skip_special_tokens is not False
        self._only_echo = body.max_tokens == 0
        self._is_plain = not (  # a chunk of text tells nothing else
            self._only_echo or body.return_token_ids or body.wants_running_usage
        )
        self._created = int(time.time())
        self._starts: dict[int, int] = {}  # choice -> length of its echoed prompt
        self._templates: dict[int, ChunkTemplate] = {}  # choice -> its chunks of text alone
        self._silent: dict[int, int] = {}  # choice -> tokens since its last chunk

    async def whole(self, generation: Generation) -> Completion:
        """The reply once everything is there."""
        found = [_Whole() for _ in range(self.job.num_choices)]
        async with aclosing(generation.events()) as events:
            async for item in events:
                found[item.index].add(item)
        if self._only_echo:
            for choice in generation.choices:
                choice.num_tokens = 0
        of_prompts = [piece for part in found for piece in part.prompt or ()]
        size = logprobs_size(of_prompts, *(part.entries for part in found))
        answer = await by_size(size, self._answer, found, generation)
        answer.usage = usage(generation.counts())
        answer.metrics = self._metrics(generation)
        return answer

    def _answer(self, found: list[_Whole], generation: Generation) -> Completion:
        return self._completion(
            [
                self._whole_choice(prompt * self._n + place, prompt, index, found[index], found)
                for prompt in range(len(self.job.prompts))
                for place, index in enumerate(self._best(prompt, generation))
            ]
        )

    def _metrics(self, generation: Generation) -> ReplyMetrics | UnsetType:
        return reply_metrics(self._services, self._body.speculative, generation.choices)

    def _best(self, prompt: int, generation: Generation) -> list[int]:
        """The job's choices of a prompt that are shown: best_of's best by mean log probability."""
        indices = list(range(prompt * self.job.n, (prompt + 1) * self.job.n))
        if self.job.n == self._n:
            return indices
        choices = generation.choices

        def mean(index: int) -> float:
            return choices[index].logprob_sum / max(choices[index].num_tokens, 1)

        return sorted(indices, key=mean, reverse=True)[: self._n]

    def _whole_choice(
        self, index: int, prompt: int, own: int, part: _Whole, all_parts: list[_Whole]
    ) -> CompletionChoice:
        body = self._body
        if self._only_echo:
            part = _Whole(finish_reason="length")
        of_prompt = all_parts[prompt * self.job.n].prompt  # only child 0 computed it
        text, logprobs = self._with_echo("".join(part.text), part.entries, prompt, of_prompt)
        choice = CompletionChoice(index, text, logprobs, part.finish_reason, part.stop_reason)
        if body.return_token_ids:
            choice.token_ids = part.token_ids
            choice.prompt_token_ids = self.job.prompts[prompt]
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._prompt_logprobs(of_prompt)
        return choice

    def _prompt_logprobs(self, found: list[bytes] | None) -> PromptLogprobs:
        known = [] if found is None else unpack_logprobs(found)
        return prompt_logprobs(known, self._services.tokenizer)

    def _with_echo(
        self,
        text: str,
        entries: list[TokenEntry],
        prompt: int,
        of_prompt: list[bytes] | None,
    ) -> tuple[str, CompletionLogprobs | None]:
        """Text and logprobs of a choice's beginning, after the prompt if that is echoed."""
        tokenizer = self._services.tokenizer
        echoed = self._echo_text(prompt) if self._body.echo else ""
        if self._body.logprobs is None:
            return echoed + text, None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        logprobs = completion_logprobs(entries, tokenizer, len(echoed), as_ids)
        if self._body.echo:
            ids = self.job.prompts[prompt]
            known = [] if of_prompt is None else unpack_logprobs(of_prompt)
            before = echoed_logprobs(ids, known, tokenizer, echoed, as_ids)
            logprobs = joined(before, logprobs)
        return echoed + text, logprobs

    def _echo_text(self, prompt: int) -> str:
        given = self._body.prompts[prompt]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._services.tokenizer.decode(self.job.prompts[prompt], self._skip)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            self.job.request_id,
            self._created,
            self._body.model,
            self._services.fingerprint,
            choices,
        )

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The reply as events."""
        body = self._body
        of_prompts: dict[int, list[bytes] | None] = {}
        waiting: dict[int, list[GenerationEvent]] = {}
        async with aclosing(generation.events()) as events:
            async for item in events:
                prompt = item.index // self.job.n
                if body.echo and body.logprobs is not None:
                    # Child 0 brings the prompt's logprobs; its siblings wait for them.
                    if item.prompt_logprobs is not None:
                        of_prompts[prompt] = item.prompt_logprobs
                    elif prompt not in of_prompts:
                        waiting.setdefault(prompt, []).append(item)
                        continue
                ready = (item, *waiting.pop(prompt, ()))
                of_prompt = of_prompts.get(prompt)
                size = 0 if item.index in self._starts else logprobs_size(of_prompt)
                data = await by_size(size, self._framed_chunks, ready, generation, of_prompt)
                if data:
                    yield data
        if body.wants_usage:
            if self._only_echo:
                for each in generation.choices:
                    each.num_tokens = 0
            last = self._completion([])
            last.usage = usage(generation.counts())
            last.metrics = self._metrics(generation)
            yield event(encode(last))
        yield DONE

    def live(self, generation: Generation) -> Live | None:
        """The same events while they come; only behind the first, which may echo the prompt."""
        fill = self._template(0, generation).fill if self._is_plain else None
        follow = generation.live(lambda item: self._framed_chunk(item, generation, None), fill)
        if follow is None:
            return None

        async def behind_first(write: Write) -> None:
            if self._starts:
                await follow(write)

        return behind_first

    def _framed_chunks(
        self,
        items: Sequence[GenerationEvent],
        generation: Generation,
        of_prompt: list[bytes] | None,
    ) -> bytes:
        return b"".join(self._framed_chunk(item, generation, of_prompt) for item in items)

    def _framed_chunk(
        self,
        item: GenerationEvent,
        generation: Generation,
        of_prompt: list[bytes] | None,
    ) -> bytes:
        """An event for what came; empty if there is nothing to tell."""
        index = item.index
        if item.text and index in self._starts and not (item.finish_reason or item.logprobs):
            if self._is_plain:
                self._silent[index] = 0
                return self._template(index, generation).fill(item.text)
        is_first = index not in self._starts  # it may echo the prompt
        choice = self._chunk(item, self._starts, of_prompt)
        return b"" if choice is None else self._framed(choice, generation, is_first)

    def _template(self, index: int, generation: Generation) -> ChunkTemplate:
        if (known := self._templates.get(index)) is None:
            choice = CompletionChoice(index, PLACE, stop_reason=UNSET)
            known = self._templates[index] = ChunkTemplate(self._framed(choice, generation))
        return known

    def _framed(
        self, choice: CompletionChoice, generation: Generation, may_be_large: bool = False
    ) -> bytes:
        chunk = self._completion([choice])
        if self._body.wants_usage:
            running = self._body.wants_running_usage
            chunk.usage = usage(generation.counts()) if running else None
        return event(encode_in_pieces(chunk) if may_be_large else encode(chunk))

    def _chunk(
        self,
        item: GenerationEvent,
        starts: dict[int, int],
        of_prompt: list[bytes] | None,
    ) -> CompletionChoice | None:
        """One choice's part of a chunk; None if there is nothing to tell."""
        body, index = self._body, item.index
        first = index not in starts
        prompt = index // self.job.n
        text, entries, ids = item.text, item.logprobs, item.token_ids
        if self._only_echo:
            text, entries, ids = "", [], []
        logprobs = None
        if first and body.echo:
            text, logprobs = self._with_echo(text, entries, prompt, of_prompt)
            starts[index] = len(self._echo_text(prompt))
        else:
            starts.setdefault(index, 0)
            if body.logprobs is not None and entries:
                as_ids = bool(body.return_tokens_as_token_ids)
                tokenizer = self._services.tokenizer
                logprobs = completion_logprobs(entries, tokenizer, starts[index], as_ids)
        told = text or logprobs is not None or item.finish_reason or body.return_token_ids
        silent = 0 if told else self._silent.get(index, 0) + len(ids)
        self._silent[index] = silent % MAX_SILENT_TOKENS
        if not told and silent < MAX_SILENT_TOKENS:
            return None
        choice = CompletionChoice(index, text, logprobs, item.finish_reason)
        choice.stop_reason = item.stop_reason if item.finish_reason else UNSET
        if self._only_echo and item.finish_reason:
            choice.finish_reason, choice.stop_reason = "length", None
        if body.return_token_ids:
            choice.token_ids = ids
            if first:
                choice.prompt_token_ids = self.job.prompts[prompt]
        return choice
