"""Turns a request body into a job, the same way for chat, completions and responses.

Invalid requests are refused here, before they reach the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from ..off_loop import by_size
from ..openai_types.common import GenerationBody
from ..output.chat_tools import ChatFormat
from ..output.sampling import ModelLimits, check_prompt_logprobs, sampling_params
from ..text.choice_text import TextOptions
from .generation import Job
from .prompt_ids import Fit, room, truncated
from .prompts import Prompts
from .services import Services


@dataclass(frozen=True)
class Wanted:
    """The options that each endpoint spells in its own way.

    `prepare` reads the fields that all bodies share itself.
    """

    id_prefix: str  # prefix of the request id, such as "chatcmpl"
    param: str  # body field with the prompt, for error messages
    encode: Callable[[Fit], Awaitable[Prompts]]  # tokenizes the prompts
    n: int  # choices per prompt
    max_tokens: int | None  # None: as many as fit, at most --default-max-tokens
    logprobs: int | None  # alternatives per token; None: no log probabilities
    echo_logprobs: int | None = None  # alternatives per token of an echoed prompt
    prompt_copies: int = 1  # times that a reply repeats a prompt's log probabilities
    form: ChatFormat = ChatFormat()


async def prepare(services: Services, body: GenerationBody, wanted: Wanted) -> Job:
    """The job of a request.

    Raises ModelNotFound, NotReady, ContextLengthExceeded and other kinds of InvalidRequest.
    """
    services.check_model(body.model)
    services.check_ready()
    ready, tokenizer = services.engine.ready, services.tokenizer
    limits = ModelLimits.of(ready, tokenizer, services.config.model.max_logprobs)
    if ends := wanted.form.end_ids(tokenizer):
        limits = replace(limits, eos_token_ids=limits.eos_token_ids | ends)
    sampling = await by_size(
        body.analysis_bytes,
        sampling_params,
        body,
        limits,
        tokenizer,
        services.seeds,
        wanted.logprobs,
        wanted.echo_logprobs,
        wanted.form.grammar,
    )
    fit = Fit(ready.max_model_len, wanted.param, body.truncate_prompt_tokens, wanted.max_tokens)
    prompts = await wanted.encode(fit)
    min_tokens = body.min_tokens or 0
    default = services.config.server.default_max_tokens
    if default is not None:
        default = max(default, min_tokens)
    ids = await by_size(body.num_bytes, lambda: [truncated(each, fit) for each in prompts.ids])
    num_reported = wanted.prompt_copies * sum(map(len, ids))
    param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_logprobs(sampling, num_reported, limits, param)
    return Job(
        request_id=f"{wanted.id_prefix}-{uuid.uuid4().hex}",
        prompts=ids,
        prompt_text=prompts.text,
        sampling=sampling,
        max_tokens=[room(each, fit, default) for each in ids],
        text=TextOptions(
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=min_tokens,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            keep=wanted.form.kept_ids(tokenizer),
            reports_steps=body.wants_steps,
        ),
        n=wanted.n,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        predicted=body.prediction is not None,
    )
