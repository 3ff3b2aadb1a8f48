"""POST /v1/chat/completions, answered whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from ...runner.messages import unpack_logprobs
from ..errors import InvalidRequest
from ..generation.generation import Generation, Job
from ..generation.logprobs import chat_logprobs, prompt_logprobs
from ..generation.prepare import Wanted, prepare
from ..generation.prompts import chat_prompt
from ..generation.reply import ChunkFramer, Collected, Reply, StreamedChoice, Whole
from ..generation.respond import respond
from ..generation.services import Services
from ..off_loop import by_size
from ..openai_types.chat import ChatCompletionRequest
from ..openai_types.replies import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from ..output.chat_output import MessageBuilder, PlainText
from ..output.chat_tools import ChatFormat, chat_format
from ..text.choice_text import GenerationEvent, TokenEntry


def chat_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        arrived = time.monotonic()
        body = await services.bodies.read(request, ChatCompletionRequest)
        form = await by_size(body.analysis_bytes, chat_format, services.output_format, body)
        job = await prepare_chat(services, body, form)
        reply = _Reply(services, body, Generation(services, job, arrived), form)
        shape = _Framer(reply) if body.stream else _Whole(reply)
        return await respond(request, reply.generation, shape)

    return router


async def prepare_chat(services: Services, body: ChatCompletionRequest, form: ChatFormat) -> Job:
    """The job of a chat. Raises what `prepare` raises."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is only allowed when 'logprobs' is true.",
            "top_logprobs",
            "invalid_value",
        )
    wanted = Wanted(
        id_prefix="chatcmpl",
        param="messages",
        encode=partial(chat_prompt, services, body, form.tools, end=form.prompt_end),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=form,
    )
    return await prepare(services, body, wanted)


class _Reply(Reply):
    """Converts the events of a chat; shared by whole replies and streams."""

    def __init__(
        self,
        services: Services,
        body: ChatCompletionRequest,
        generation: Generation,
        form: ChatFormat,
    ) -> None:
        super().__init__(services, body, generation)
        self.body = body
        self._form = form
        self._parsers = [form.parser(self.job.prompt_text) for _ in range(self.job.n)]
        self._called: set[int] = set()  # indices of choices that call a tool

    def deltas(self, item: GenerationEvent) -> list[Delta]:
        """The deltas that an event adds to the message of its choice."""
        parser = self._parsers[item.index]
        deltas = parser.push(item.text, item.token_ids)
        if item.finish_reason:
            deltas = deltas + parser.finish()
        if any(delta.tool_calls or delta.function_call for delta in deltas):
            self._called.add(item.index)
        return deltas

    def is_plain(self, index: int) -> bool:
        """Whether all text of the choice is content, without tool calls or reasoning."""
        return isinstance(self._parsers[index], PlainText)

    def finish_reason(self, index: int, reason: str) -> str:
        return self._form.finish_reason(reason, index in self._called)

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(entries, self.services.tokenizer, as_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self._parsers)


class _Whole(Whole):
    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply.job.n)
        self._reply = reply
        self._messages = [MessageBuilder() for _ in self.parts]

    def add(self, item: GenerationEvent) -> None:
        super().add(item)
        for delta in self._reply.deltas(item):
            self._messages[item.index].add(delta)

    def answer(self) -> ChatCompletion:
        reply, body = self._reply, self._reply.body
        choices = [self._choice(index, part) for index, part in enumerate(self.parts)]
        answer = ChatCompletion(*reply.head, choices, reply.usage())
        answer.metrics = reply.metrics()
        if body.return_token_ids:
            answer.prompt_token_ids = reply.job.prompts[0]
        if body.prompt_logprobs is not None:
            found = unpack_logprobs(self.parts[0].prompt_logprobs or ())
            answer.prompt_logprobs = prompt_logprobs(found, reply.services.tokenizer)
        return answer

    def _choice(self, index: int, part: Collected) -> ChatChoice:
        assert part.finish_reason is not None
        reason = self._reply.finish_reason(index, part.finish_reason)
        message = self._messages[index].message()
        choice = ChatChoice(index, message, reason, stop_reason=part.stop_reason)
        if self._reply.body.logprobs:
            choice.logprobs = self._reply.logprobs(part.logprobs)
        if self._reply.body.return_token_ids:
            choice.token_ids = part.token_ids
        return choice


class _Framer(ChunkFramer):
    """A chat completion as a stream: roles, deltas, the usage if requested."""

    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply)
        self._chat = reply

    def first(self) -> bytes:
        """A chunk with the role of each choice; `content` is null if only tool calls may follow."""
        pieces = []
        for index in range(self._chat.job.n):
            content = "" if self._chat.is_plain(index) else None
            chunk = self.chunk([ChunkChoice(index, Delta(role="assistant", content=content))])
            if self._chat.body.return_token_ids:
                chunk.prompt_token_ids = self._chat.job.prompts[0]
            pieces.append(self.framed(chunk))
        return b"".join(pieces)

    def text_choice(self, index: int, text: str) -> ChunkChoice | None:
        return ChunkChoice(index, Delta(content=text)) if self._chat.is_plain(index) else None

    def choices(self, item: GenerationEvent, streamed: StreamedChoice) -> Sequence[ChunkChoice]:
        """One choice per delta: the first has token ids and logprobs, the last a finish reason."""
        body, deltas = self._chat.body, self._chat.deltas(item)
        overdue = streamed.is_overdue(len(item.token_ids), bool(deltas))
        has_tokens = item.logprobs or item.steps or (body.return_token_ids and item.token_ids)
        must = item.finish_reason or has_tokens
        if not deltas and (must or overdue):
            deltas = [Delta(content=None if streamed.began or not item.finish_reason else "")]
        elif deltas:
            streamed.began = True
        choices = [ChunkChoice(item.index, delta) for delta in deltas]
        if choices and body.logprobs and item.logprobs:
            choices[0].logprobs = self._chat.logprobs(item.logprobs)
        if choices and body.return_token_ids:
            choices[0].token_ids = item.token_ids
        if item.steps:
            choices[0].speculative_steps = self._chat.steps(item.steps)
        if item.finish_reason:
            choices[-1].finish_reason = self._chat.finish_reason(item.index, item.finish_reason)
            choices[-1].stop_reason = item.stop_reason
        return choices

    def chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(*self._chat.head, choices)
