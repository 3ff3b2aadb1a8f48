"""POST /v1/responses: served as a chat, in another format. Nothing is stored between requests."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from ..errors import APIError, InvalidRequest, NotSupported
from ..generation.generation import Generation, Job
from ..generation.logprobs import chat_logprobs
from ..generation.reply import Framer, Whole
from ..generation.respond import respond
from ..generation.services import Services
from ..http.body import validated
from ..http.sse import event
from ..off_loop import by_size
from ..openai_types.chat import ChatCompletionRequest
from ..openai_types.responses import CHAT_NAMES, Reasoning, ResponsesRequest
from ..output.chat_output import MessageParser
from ..output.chat_tools import ChatFormat, chat_format
from ..text.choice_text import GenerationEvent
from .chat import prepare_chat
from .response_items import ResponseItems


class InputTokens(msgspec.Struct):
    """The reply of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


def response_routes(services: Services) -> APIRouter:
    """The routes of responses; those for stored responses answer 404."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        arrived = time.monotonic()
        body = await services.bodies.read(request, ResponsesRequest)
        _check(body)
        job, form = await _prepare(services, body)
        generation = Generation(services, job, arrived)
        reply = _Reply(services, body, generation, form.parser(job.prompt_text))
        return await respond(request, generation, _Framer(reply) if body.stream else reply)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(request: Request) -> Response:
        body = await services.bodies.read(request, ResponsesRequest)
        _check(body)
        job, _ = await _prepare(services, body)
        count = InputTokens(len(job.prompts[0]))
        return Response(msgspec.json.encode(count), media_type="application/json")

    async def absent(request: Request) -> Response:
        if request.path_params.get("response_id") in ("compact", "input_tokens"):
            raise HTTPException(405, headers={"Allow": "POST"})
        raise NotSupported("This server does not store responses; send the whole conversation.")

    router.add_api_route("/v1/responses/compact", absent, methods=["POST"], status_code=404)
    for path, methods in (
        ("/v1/responses/{response_id}", ["GET", "DELETE"]),
        ("/v1/responses/{response_id}/cancel", ["POST"]),
        ("/v1/responses/{response_id}/input_items", ["GET"]),
    ):
        router.add_api_route(path, absent, methods=methods, include_in_schema=False)
    return router


async def _prepare(services: Services, body: ResponsesRequest) -> tuple[Job, ChatFormat]:
    try:
        chat, form = await by_size(body.analysis_bytes, _as_chat, services, body)
        return await prepare_chat(services, chat, form), form
    except InvalidRequest as error:
        raise _renamed(error) from None


def _as_chat(
    services: Services, body: ResponsesRequest
) -> tuple[ChatCompletionRequest, ChatFormat]:
    given = {name: value for name, value in body.chat().items() if value is not None}
    chat = validated(given, ChatCompletionRequest)
    chat.note_size(body.num_bytes)
    return chat, chat_format(services.output_format, chat)


def _check(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if getattr(body, name):
            raise InvalidRequest(
                f"'{name}' is not supported, because this server does not store responses: "
                "send the whole conversation as 'input'.",
                name,
                "not_supported",
            )


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """An error about a chat's parameter, with this endpoint's name for the parameter."""
    for chat, own in CHAT_NAMES.items():
        if error.param is not None and error.param.startswith(chat):
            error.message = error.message.replace(f"'{error.param}'", f"'{own}'")
            error.param = own
    return error


class _Reply(Whole):
    """The response of one request, built up event by event."""

    def __init__(
        self,
        services: Services,
        body: ResponsesRequest,
        generation: Generation,
        parser: MessageParser,
    ) -> None:
        super().__init__(generation.job.num_choices)
        self._services = services
        self._body = body
        self._generation = generation
        self._parser = parser
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items = ResponseItems()
        self._reason: str | None = None

    @property
    def status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def add(self, item: GenerationEvent) -> None:
        self.events(item)

    def answer(self) -> dict[str, Any]:
        return self.response(self.status)

    def events(self, item: GenerationEvent) -> list[dict[str, Any]]:
        """Add an event to the items; returns its stream events without sequence numbers."""
        deltas = self._parser.push(item.text, item.token_ids)
        if item.finish_reason:
            deltas = deltas + self._parser.finish()
        if self._body.wants_logprobs:
            shown = [entry for entry in item.logprobs if not entry.hidden]
            found = chat_logprobs(shown, self._services.tokenizer).content
            self._items.logprobs += msgspec.to_builtins(found)
        events = [each for delta in deltas for each in self._items.add(delta)]
        if item.finish_reason:
            self._reason = item.finish_reason
            events += self._items.finish(self.status)
        return events

    def response(self, status: str, error: APIError | None = None) -> dict[str, Any]:
        """The response object in its present state."""
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        reasoning, choice = body.reasoning or Reasoning(), body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": body.model,
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": self._text_format(),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _text_format(self) -> dict[str, Any]:
        given = self._body.text.format if self._body.text else None
        form = given.model_dump(by_alias=True, exclude_none=True) if given else {"type": "text"}
        verbosity = self._body.text.verbosity if self._body.text else None
        return {"format": form, "verbosity": verbosity or "medium"}

    def _usage(self) -> dict[str, Any]:
        counts = self._generation.counts()
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens},
            "total_tokens": counts.prompt + counts.completion,
        }


class _Framer(Framer):
    """The response as a stream of numbered events; an error ends it with response.failed."""

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply
        self._number = 0

    def first(self) -> bytes:
        names = ("created", "in_progress")
        return b"".join([self._response(name, "in_progress") for name in names])

    def delta(self, item: GenerationEvent) -> bytes:
        return b"".join([self._framed(each) for each in self._reply.events(item)])

    def last(self) -> bytes:
        return self._response(self._reply.status, self._reply.status)

    def failed(self, error: APIError) -> bytes:
        return self._response("failed", "failed", error)

    def _response(self, name: str, status: str, error: APIError | None = None) -> bytes:
        response = self._reply.response(status, error)
        return self._framed({"type": f"response.{name}", "response": response})

    def _framed(self, fields: dict[str, Any]) -> bytes:
        numbered = {**fields, "sequence_number": self._number}
        self._number += 1
        return event(msgspec.json.encode(numbered), fields["type"])
