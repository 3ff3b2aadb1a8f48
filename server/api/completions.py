"""POST /v1/completions, answered whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from ...runner.messages import unpack_logprobs
from ..errors import InvalidRequest
from ..generation.generation import Generation, Job
from ..generation.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from ..generation.prepare import Wanted, prepare
from ..generation.prompts import completion_prompts
from ..generation.reply import ChunkFramer, Collected, Reply, StreamedChoice, Whole
from ..generation.respond import respond
from ..generation.services import Services
from ..off_loop import logprobs_size
from ..openai_types.completions import CompletionRequest
from ..openai_types.replies import Completion, CompletionChoice, CompletionLogprobs, Usage
from ..text.choice_text import GenerationEvent, TokenEntry

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def completion_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        arrived = time.monotonic()
        body = await services.bodies.read(request, CompletionRequest)
        job = await _prepare(services, body)
        reply = _Reply(services, body, Generation(services, job, arrived))
        shape = _Framer(reply) if body.stream else _Whole(reply)
        return await respond(request, reply.generation, shape)

    return router


async def _prepare(services: Services, body: CompletionRequest) -> Job:
    n, best_of = body.n or 1, body.best_of or body.n or 1
    _check(body, n, best_of)
    logprobs = body.logprobs
    wanted = Wanted(
        id_prefix="cmpl",
        param="prompt",
        encode=partial(completion_prompts, services, body),
        n=best_of,
        max_tokens=max(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, 1),
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        echo_logprobs=logprobs if body.echo else None,
        prompt_copies=n,
    )
    return await prepare(services, body, wanted)


def _check(body: CompletionRequest, n: int, best_of: int) -> None:
    wrong: tuple[str, str] | None = None
    if body.suffix:
        wrong = "suffix", "this server does not support fill-in-the-middle"
    elif best_of < n:
        wrong = "best_of", f"it must be at least n ({n})"
    elif best_of > n and body.stream:
        wrong = "best_of", "a value above n is not available with 'stream'"
    elif body.max_tokens == 0 and not body.echo:
        wrong = "max_tokens", "it must be at least 1 unless 'echo' is set"
    if wrong:
        raise InvalidRequest(
            f"Invalid value for '{wrong[0]}': {wrong[1]}.", wrong[0], "invalid_value"
        )


class _Reply(Reply):
    """Converts events and echoed prompts; shared by whole replies and streams."""

    def __init__(self, services: Services, body: CompletionRequest, generation: Generation) -> None:
        super().__init__(services, body, generation)
        self.body = body
        self.only_echo = body.max_tokens == 0  # one token is generated, but not reported
        self._skip = body.skip_special_tokens is not False

    def usage(self) -> Usage:
        if self.only_echo:
            for choice in self.generation.choices:
                choice.num_tokens = 0
        return super().usage()

    def echo(self, prompt: int) -> str:
        """The echoed text of a prompt, or "" without `echo`."""
        if not self.body.echo:
            return ""
        given = self.body.prompts[prompt]
        if isinstance(given, str) and self.body.truncate_prompt_tokens is None:
            return given
        return self.services.tokenizer.decode(self.job.prompts[prompt], self._skip)

    def logprobs(self, entries: Sequence[TokenEntry], start: int) -> CompletionLogprobs:
        """The log probabilities of output tokens, after `start` characters of echo."""
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return completion_logprobs(entries, self.services.tokenizer, start, as_ids)

    def beginning(
        self,
        text: str,
        entries: Sequence[TokenEntry],
        prompt: int,
        of_prompt: list[bytes] | None,
    ) -> tuple[str, CompletionLogprobs | None]:
        """Text and logprobs of the first part of a choice, preceded by those of an echoed prompt.

        `of_prompt` are the packed log probabilities of the prompt.
        """
        echoed = self.echo(prompt)
        if self.body.logprobs is None:
            return echoed + text, None
        logprobs = self.logprobs(entries, len(echoed))
        if self.body.echo:
            as_ids = bool(self.body.return_tokens_as_token_ids)
            ids, tokenizer = self.job.prompts[prompt], self.services.tokenizer
            known = [] if of_prompt is None else unpack_logprobs(of_prompt)
            before = echoed_logprobs(ids, known, tokenizer, echoed, as_ids)
            logprobs = joined(before, logprobs)
        return echoed + text, logprobs


class _Whole(Whole):
    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply.job.num_choices)
        self._reply = reply
        self._n = reply.body.n or 1

    def answer(self) -> Completion:
        reply = self._reply
        choices = [
            self._choice(prompt * self._n + place, prompt, self.parts[own])
            for prompt in range(len(reply.job.prompts))
            for place, own in enumerate(self._best(prompt))
        ]
        answer = Completion(*reply.head, choices)
        answer.usage, answer.metrics = reply.usage(), reply.metrics()
        return answer

    def _best(self, prompt: int) -> list[int]:
        """The indices of a prompt's reported choices: the best n of best_of by mean logprob."""
        n, choices = self._reply.job.n, self._reply.generation.choices
        indices = list(range(prompt * n, (prompt + 1) * n))
        if n == self._n:
            return indices

        def mean(index: int) -> float:
            return choices[index].logprob_sum / max(choices[index].num_tokens, 1)

        return sorted(indices, key=mean, reverse=True)[: self._n]

    def _choice(self, index: int, prompt: int, part: Collected) -> CompletionChoice:
        reply, body = self._reply, self._reply.body
        if reply.only_echo:
            part = Collected(finish_reason="length")
        of_prompt = self.parts[prompt * reply.job.n].prompt_logprobs  # only choice 0 computes them
        text, logprobs = reply.beginning("".join(part.texts), part.logprobs, prompt, of_prompt)
        choice = CompletionChoice(index, text, logprobs, part.finish_reason, part.stop_reason)
        if body.return_token_ids:
            choice.token_ids = part.token_ids
            choice.prompt_token_ids = reply.job.prompts[prompt]
        if body.prompt_logprobs is not None:
            known = [] if of_prompt is None else unpack_logprobs(of_prompt)
            choice.prompt_logprobs = prompt_logprobs(known, reply.services.tokenizer)
        return choice


class _Framer(ChunkFramer):
    """A completion as a stream: the echoed prompt, text, the usage if requested."""

    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply)
        self._completion = reply
        self._starts = [0] * reply.job.num_choices  # choice -> length of its echo in characters
        self._of_prompts: dict[int, list[bytes]] = {}
        self._waiting: dict[int, list[GenerationEvent]] = {}  # by prompt; wait for its logprobs

    def chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(*self._completion.head, choices)

    def text_choice(self, index: int, text: str) -> CompletionChoice | None:
        """The choice of a text-only chunk."""
        only_echo = self._completion.only_echo
        return None if only_echo else CompletionChoice(index, text, stop_reason=UNSET)

    def size(self, item: GenerationEvent) -> int:
        if self._streamed[item.index].began:
            return 0
        prompt = item.index // self._completion.job.n
        return logprobs_size(item.prompt_logprobs or self._of_prompts.get(prompt))

    def choices(
        self, item: GenerationEvent, streamed: StreamedChoice
    ) -> Sequence[CompletionChoice]:
        made = [self._choice(each, self._streamed[each.index]) for each in self._ready(item)]
        return [choice for choice in made if choice is not None]

    def _ready(self, item: GenerationEvent) -> list[GenerationEvent]:
        """The events to send now; siblings wait for choice 0, which has the prompt's logprobs."""
        body, prompt = self._completion.body, item.index // self._completion.job.n
        if not body.echo or body.logprobs is None:
            return [item]
        if item.prompt_logprobs is not None:
            self._of_prompts[prompt] = item.prompt_logprobs
        elif prompt not in self._of_prompts:
            self._waiting.setdefault(prompt, []).append(item)
            return []
        return [item, *self._waiting.pop(prompt, ())]

    def _choice(self, item: GenerationEvent, streamed: StreamedChoice) -> CompletionChoice | None:
        """The choice to send for an event, the first with the echo; None if there is none yet."""
        reply, body, index = self._completion, self._completion.body, item.index
        prompt, is_first = index // reply.job.n, not streamed.began
        streamed.began = True
        text, entries, ids = item.text, item.logprobs, item.token_ids
        if reply.only_echo:
            text, entries, ids = "", [], []
        logprobs = None
        if is_first and body.echo:
            self._starts[index] = len(reply.echo(prompt))
            text, logprobs = reply.beginning(text, entries, prompt, self._of_prompts.get(prompt))
        elif body.logprobs is not None and entries:
            logprobs = reply.logprobs(entries, self._starts[index])
        must = text or logprobs is not None or item.finish_reason or body.return_token_ids
        must = must or bool(item.steps)
        if not streamed.is_overdue(len(ids), bool(must)) and not must:
            return None
        choice = CompletionChoice(index, text, logprobs, item.finish_reason)
        choice.stop_reason = item.stop_reason if item.finish_reason else UNSET
        if item.steps and not reply.only_echo:
            choice.speculative_steps = reply.steps(item.steps)
        if reply.only_echo and item.finish_reason:
            choice.finish_reason, choice.stop_reason = "length", None
        if body.return_token_ids:
            choice.token_ids = ids
            if is_first:
                choice.prompt_token_ids = reply.job.prompts[prompt]
        return choice
