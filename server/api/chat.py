"""POST /v1/chat/completions: parse, render, generate, answer whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from ...runner.messages import unpack_logprobs
from ..errors import InvalidRequest
from ..generation.chunk_template import PLACE, ChunkTemplate
from ..generation.generation import Generation, Job
from ..generation.logprobs import chat_logprobs, prompt_logprobs
from ..generation.prompt_ids import Fit, room, tokenize_chat, truncated
from ..generation.prompts import render_chat
from ..generation.respond import respond
from ..generation.services import Services
from ..generation.usage import reply_metrics, usage
from ..http.sse import DONE, MAX_SILENT_TOKENS, Live, event
from ..off_loop import by_size, logprobs_size
from ..openai_types.chat import ChatCompletionRequest
from ..openai_types.replies import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    ReplyMetrics,
    encode,
)
from ..output.chat_output import MessageBuilder, MessageParser, PlainText
from ..output.chat_tools import ChatFormat, chat_format
from ..output.sampling import ModelLimits, check_prompt_logprobs, sampling_params
from ..text.choice_text import GenerationEvent, TextOptions, TokenEntry


def chat_routes(services: Services) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        arrived = time.monotonic()
        body = await services.bodies.read(request, ChatCompletionRequest)
        form = await by_size(body.analysis_bytes, chat_format, services.output_format, body)
        job, prompt = await prepare_chat(services, body, form)
        reply = _Reply(services, body, job, [form.parser(prompt) for _ in range(job.n)], form)
        return await respond(
            request,
            Generation(services, job, arrived),
            reply,
            stream=bool(body.stream),
            wait=job.sampling.grammar is not None,
        )

    return router


async def prepare_chat(
    services: Services, body: ChatCompletionRequest, form: ChatFormat
) -> tuple[Job, str]:
    """The job and the rendered chat; whatever can be refused is refused here."""
    services.check_model(body.model)
    services.check_ready()
    limits = ModelLimits.of(
        services.engine.ready, services.tokenizer, services.config.model.max_logprobs
    )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is only allowed when 'logprobs' is true.",
            "top_logprobs",
            "invalid_value",
        )
    params = partial(
        sampling_params,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=form.grammar,
    )
    size = body.analysis_bytes
    sampling = await by_size(size, params, body, limits, services.tokenizer, services.seeds)
    wanted = body.max_completion_tokens
    if wanted is None:
        wanted = body.max_tokens
    fit = Fit(limits.max_model_len, "messages", body.truncate_prompt_tokens, wanted)
    prompt = await render_chat(services, body, form.tools)
    ids = await tokenize_chat(services, prompt, bool(body.add_special_tokens), fit)
    ids = truncated(ids, fit)
    check_prompt_logprobs(sampling, len(ids), limits)
    default = services.config.server.default_max_tokens
    if default is not None:
        default = max(default, body.min_tokens or 0)
    job = Job(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompts=[ids],
        sampling=sampling,
        max_tokens=[room(ids, fit, default)],
        text=TextOptions(
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            keep=form.kept_ids(services.tokenizer),
        ),
        n=body.n or 1,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        predicted=body.prediction is not None,
    )
    return job, prompt.text


@dataclass
class _Whole:
    """One message as far as it has come."""

    message: MessageBuilder = field(default_factory=MessageBuilder)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    last: GenerationEvent | None = None


@dataclass
class _Told:
    """What a stream has said of one choice."""

    anything: bool = False
    called: bool = False
    num_silent: int = 0  # tokens since the last chunk

    def add(self, item: GenerationEvent, deltas: list[Delta]) -> None:
        self.anything |= bool(deltas)
        self.called |= any(delta.tool_calls or delta.function_call for delta in deltas)
        self.num_silent = 0 if deltas else self.num_silent + len(item.token_ids)

    def text(self) -> None:
        """As `add` for a chunk of text."""
        self.anything = True
        self.num_silent = 0

    def is_overdue(self) -> bool:
        """Whether an empty chunk must show that tokens come, though they have no text yet."""
        if self.num_silent < MAX_SILENT_TOKENS:
            return False
        self.num_silent = 0
        return True


class _Reply:
    """Turns events into OpenAI's shapes."""

    def __init__(
        self,
        services: Services,
        body: ChatCompletionRequest,
        job: Job,
        parsers: list[MessageParser],
        form: ChatFormat,
    ) -> None:
        self.job = job
        self._services = services
        self._body = body
        self._form = form
        self._parsers = parsers
        self._told = [_Told() for _ in parsers]
        self._templates: dict[int, ChunkTemplate] = {}  # choice -> its chunks of text alone
        self._created = int(time.time())

    async def whole(self, generation: Generation) -> ChatCompletion:
        """The reply once everything is there."""
        found = [_Whole() for _ in range(self.job.num_choices)]
        of_prompt: list[bytes] = []
        async with aclosing(generation.events()) as events:
            async for item in events:
                part = found[item.index]
                for delta in self._deltas(item):
                    part.message.add(delta)
                part.token_ids += item.token_ids
                part.entries += item.logprobs
                part.last = item
                of_prompt = of_prompt or item.prompt_logprobs or []
        size = logprobs_size(of_prompt, *(part.entries for part in found))
        return await by_size(size, self._answer, found, of_prompt, generation)

    def _answer(
        self,
        found: list[_Whole],
        of_prompt: list[bytes],
        generation: Generation,
    ) -> ChatCompletion:
        answer = ChatCompletion(
            self.job.request_id,
            self._created,
            self._body.model,
            self._services.fingerprint,
            [self._whole_choice(index, part) for index, part in enumerate(found)],
            usage(generation.counts(), self._reasoning_tokens()),
        )
        answer.metrics = self._metrics(generation)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self.job.prompts[0]
        if self._body.prompt_logprobs is not None:
            known = unpack_logprobs(of_prompt)
            answer.prompt_logprobs = prompt_logprobs(known, self._services.tokenizer)
        return answer

    def _logprobs(self, entries: list[TokenEntry]) -> ChatLogprobs:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(entries, self._services.tokenizer, as_ids)

    def _metrics(self, generation: Generation) -> ReplyMetrics | UnsetType:
        return reply_metrics(self._services, self._body.speculative, generation.choices)

    def _whole_choice(self, index: int, part: _Whole) -> ChatChoice:
        assert part.last is not None and part.last.finish_reason is not None
        reason = self._form.finish_reason(part.last.finish_reason, part.message.has_calls)
        choice = ChatChoice(
            index, part.message.message(), reason, stop_reason=part.last.stop_reason
        )
        if self._body.logprobs:
            choice.logprobs = self._logprobs(part.entries)
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
        return choice

    def _deltas(self, item: GenerationEvent) -> list[Delta]:
        parser = self._parsers[item.index]
        deltas = parser.push(item.text, item.token_ids)
        return deltas + parser.finish() if item.finish_reason else deltas

    def _reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self._parsers)

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The reply as events: roles, deltas, perhaps the usage, the end.

        All chunks of one event leave together: behind each piece `live` may go on.
        """
        for index in range(self.job.num_choices):
            yield self._framed(self._role(index), generation, first=True)
        async with aclosing(generation.events()) as events:
            async for item in events:
                if chunks := self._chunks(item, generation):
                    yield b"".join(chunks)
        if self._body.wants_usage:
            last = self._chunk([])
            last.usage = usage(generation.counts(), self._reasoning_tokens())
            last.metrics = self._metrics(generation)
            yield event(encode(last))
        yield DONE

    def live(self, generation: Generation) -> Live | None:
        """The same events while they come."""
        template = self._template(0, generation)
        fill = template.fill if template else None
        return generation.live(lambda item: b"".join(self._chunks(item, generation)), fill)

    def _chunks(self, item: GenerationEvent, generation: Generation) -> list[bytes]:
        told = self._told[item.index]
        if item.text and not (item.finish_reason or item.logprobs):
            template = self._template(item.index, generation)
            if template is not None:
                told.text()
                return [template.fill(item.text)]
        choices = self._chunk_choices(item, self._deltas(item), told)
        return [self._framed(choice, generation) for choice in choices]

    def _template(self, index: int, generation: Generation) -> ChunkTemplate | None:
        """For a choice whose text is its content and whose chunks tell nothing else."""
        known = self._templates.get(index)
        if known is not None:
            return known
        body, plain = self._body, isinstance(self._parsers[index], PlainText)
        if not plain or body.return_token_ids or body.wants_running_usage:
            return None
        framed = self._framed(ChunkChoice(index, Delta(content=PLACE)), generation)
        return self._templates.setdefault(index, ChunkTemplate(framed))

    def _role(self, index: int) -> ChunkChoice:
        """The first chunk; where the message may be calls alone, its content is still open."""
        plain = isinstance(self._parsers[index], PlainText)
        return ChunkChoice(index, Delta(role="assistant", content="" if plain else None))

    def _chunk_choices(
        self, item: GenerationEvent, deltas: list[Delta], told: _Told
    ) -> list[ChunkChoice]:
        """A chunk for each delta; the first carries tokens and logprobs, the last the end."""
        body = self._body
        told.add(item, deltas)
        must = item.finish_reason or item.logprobs or (body.return_token_ids and item.token_ids)
        if not deltas and (must or told.is_overdue()):
            deltas = [Delta(content=None if told.anything or not item.finish_reason else "")]
        choices = [ChunkChoice(item.index, delta) for delta in deltas]
        if choices and body.logprobs and item.logprobs:
            choices[0].logprobs = self._logprobs(item.logprobs)
        if choices and body.return_token_ids:
            choices[0].token_ids = item.token_ids
        if item.finish_reason:
            choices[-1].finish_reason = self._form.finish_reason(item.finish_reason, told.called)
            choices[-1].stop_reason = item.stop_reason
        return choices

    def _framed(self, choice: ChunkChoice, generation: Generation, first: bool = False) -> bytes:
        chunk = self._chunk([choice])
        if self._body.wants_usage:
            running = self._body.wants_running_usage
            chunk.usage = usage(generation.counts(), self._reasoning_tokens()) if running else None
        if first and self._body.return_token_ids:
            chunk.prompt_token_ids = self.job.prompts[0]
        return event(encode(chunk))

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            self.job.request_id,
            self._created,
            self._body.model,
            self._services.fingerprint,
            choices,
            usage=UNSET,
        )
