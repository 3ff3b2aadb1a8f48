"""POST /tokenize and /detokenize, compatible with vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from ..errors import InvalidRequest
from ..generation.prompt_ids import Fit, tokenize
from ..generation.prompts import Prompts, chat_prompt
from ..generation.services import Services
from ..off_loop import by_size
from ..openai_types.chat import ChatCompletionRequest, Message, Tool
from ..openai_types.common import Many, SizedBody, TokenId
from ..output.sampling import check_token_ids

MAX_COUNTED = 1 << 18  # tokens in a reply of /tokenize, if the model's limit is lower


class TokenizeRequest(SizedBody):
    """The body of /tokenize: a text, or a chat, which is rendered as by /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1)
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' must be given")
        return self


class DetokenizeRequest(SizedBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Many[TokenId]


class Tokens(msgspec.Struct):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The reply of /detokenize."""

    prompt: str


def tokenize_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        body = await services.bodies.read(request, TokenizeRequest)
        if body.model is not None:
            services.check_model(body.model)
        services.check_ready()
        limit = services.engine.ready.max_model_len
        most = max(limit, MAX_COUNTED)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            (ids,) = await tokenize(services, [body.prompt], special, Fit(most, "prompt"))
        else:
            (ids,) = (await _chat(services, body, Fit(most, "messages"))).ids
        reply = Tokens(len(ids), limit, ids)
        data = await by_size(body.num_bytes, _encoded, services, reply, body.return_token_strs)
        return Response(data, media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await services.bodies.read(request, DetokenizeRequest)
        if body.model is not None:
            services.check_model(body.model)
        services.check_ready()
        data = await by_size(body.num_bytes, _decoded, services, body.tokens)
        return Response(data, media_type="application/json")

    return router


def _encoded(services: Services, reply: Tokens, with_strings: bool | None) -> bytes:
    if with_strings:
        reply.token_strs = [services.tokenizer.id_to_token(i) or "" for i in reply.tokens]
    return msgspec.json.encode(reply)


def _decoded(services: Services, ids: list[int]) -> bytes:
    check_token_ids(ids, services.engine.ready.vocab_size, "tokens")
    text = services.tokenizer.decode(ids, skip_special_tokens=False)
    return msgspec.json.encode(Detokenized(text))


async def _chat(services: Services, body: TokenizeRequest, fit: Fit) -> Prompts:
    if body.messages is None:
        raise InvalidRequest("The request has no messages.", "messages")
    chat = ChatCompletionRequest.model_construct(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    chat.note_size(body.num_bytes)
    return await chat_prompt(services, chat, tools or None, fit)
