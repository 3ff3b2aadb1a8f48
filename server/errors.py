"""The server's exceptions and their mapping to HTTP statuses and OpenAI's error object.

Each class takes facts and writes its own message. Routes raise these errors and never build an
error body themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .request_stream import EngineDead, ShutDown

logger = logging.getLogger(__name__)

_MAX_ECHO = 400  # characters of client input repeated in an error message


class APIError(Exception):
    """Base of all errors sent to clients; `headers` are added to the response."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str:
        return HTTPStatus(self.status).phrase


class InvalidRequest(APIError):
    """The request is invalid; `param` names the parameter that the client must change."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param)
        self.code = code


class MalformedBody(InvalidRequest):
    def __init__(self, reason: str) -> None:
        super().__init__(f"We could not parse the JSON body of your request: {reason}.")


class UnsupportedMediaType(InvalidRequest):
    status = 415

    def __init__(self, content_type: str) -> None:
        super().__init__(f"The body must be application/json, not {content_type[:100]!r}.")


class UnsupportedEncoding(InvalidRequest):
    status = 415

    def __init__(self, coding: str) -> None:
        super().__init__(f"Bodies must be sent uncompressed, not as {coding[:40]!r}.")


class ContextLengthExceeded(InvalidRequest):
    def __init__(
        self, limit: int, prompt: int, output: int, param: str, *, exact: bool = True
    ) -> None:
        """`prompt` is the prompt's number of tokens, or a lower bound if not `exact`."""
        least = "" if exact else "at least "
        wanted = (
            f"{least}{prompt + output} tokens ({least}{prompt} in the prompt, "
            f"{output} for the output)"
        )
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{wanted}. Please shorten the prompt or the output.",
            param,
            "context_length_exceeded",
        )


class ModelNotFound(InvalidRequest):
    status = 404

    def __init__(self, model: str, served: Sequence[str]) -> None:
        shown = model if len(model) <= 200 else model[:200] + "…"
        names = ", ".join(f"`{name}`" for name in served)
        super().__init__(
            f"The model `{shown}` does not exist. This server serves {names}.",
            "model",
            "model_not_found",
        )


class NotSupported(InvalidRequest):
    status = 404

    def __init__(self, what: str) -> None:
        super().__init__(what, code="not_supported")


class AuthenticationFailed(APIError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, given: bool) -> None:
        message = (
            "Incorrect API key provided."
            if given
            else "You didn't provide an API key. Send it as `Authorization: Bearer YOUR_KEY`."
        )
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class BodyTooLarge(InvalidRequest):
    """The body exceeds --max-body-bytes."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes.", code="request_too_large"
        )


class RequestTooSlow(APIError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"

    def __init__(self, part: str, seconds: float) -> None:
        super().__init__(
            f"The {part} did not arrive within {seconds:g} seconds.",
            headers={"Connection": "close"},
        )


class HeadTooLarge(APIError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"

    def __init__(self, limit: str) -> None:
        """`limit` is the exceeded limit in words, such as "64 KiB" or "256 headers"."""
        super().__init__(f"The request head is too large: the limit is {limit}.")


class MalformedRequest(APIError):
    """The bytes received are not a valid HTTP request."""

    status = 400
    type = "invalid_request_error"
    code = "malformed_request"

    def __init__(self, why: str = "This is not a valid HTTP/1.1 request.") -> None:
        super().__init__(why)


class BodiesTooLarge(APIError):
    status = 429
    type = "rate_limit_error"
    code = "bodies_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server is busy: the bodies of its open requests together exceed {limit} bytes. "
            "Try again in 1 s.",
            headers={"Retry-After": "1"},
        )


class QueueFull(APIError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"The server is busy: {waiting} requests are running or waiting. "
            f"Try again in {retry_after} s.",
            headers={"Retry-After": str(retry_after)},
        )


class NotReady(APIError):
    """The engine is starting, restarting, draining or has failed."""

    status = 503
    type = "service_unavailable"
    code = "not_ready"

    def __init__(self, state: str, detail: str = "", retry_after: int = 1) -> None:
        reason = f"{state} ({detail.rstrip('.')})" if detail else state
        super().__init__(
            f"The engine is not ready: {reason}.", headers={"Retry-After": str(retry_after)}
        )


class EngineStopped(APIError):
    """The worker process ended while it had this request."""

    status = 503
    type = "service_unavailable"
    code = "engine_dead"

    def __init__(self, reason: str = "the engine stopped", retry_after: int = 1) -> None:
        super().__init__(
            f"The request could not be finished: {reason}.",
            headers={"Retry-After": str(retry_after)},
        )


class ServerStopped(EngineStopped):
    """The server is shutting down, and the request did not finish within --drain-timeout."""

    code = "server_shutting_down"


class GenerationFailed(APIError):
    """The engine failed on this request; other requests are not affected."""

    code = "generation_failed"


class InternalError(APIError):
    """An unexpected exception. Details go to the log, not to the client."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request. Sorry about that!")


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The JSON body of every error response."""

    error: ErrorObject


def as_api_error(error: BaseException) -> APIError:
    """The API error for any exception. Unexpected exceptions are logged with their traceback."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, EngineDead):
        kind = ServerStopped if isinstance(error, ShutDown) else EngineStopped
        return kind(str(error).rstrip("."), error.retry_after)
    logger.error("unexpected error in a request", exc_info=error)
    return InternalError()


def outcome_of(error: BaseException | None) -> str | None:
    """How metrics count a request that did not finish.

    "abort" if the client disconnected, "error" if it failed, None (not counted) if it was refused.
    """
    if isinstance(error, APIError) and error.status < 500:
        return None
    failed = isinstance(error, Exception) and not isinstance(error, ClientDisconnect)
    return "error" if failed else "abort"


def error_body(error: APIError) -> bytes:
    fields = ErrorObject(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(fields))


def error_response(error: APIError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


def invalid_value(error: ValidationError, body: object) -> InvalidRequest:
    """A problem that pydantic found, as a 400 that names the parameter."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    named = [(parameter_name(each["loc"], body, each["type"] == "missing"), each) for each in found]
    # For a union, report the member that matched deepest: it is probably the intended one.
    outer = named[0][0]
    inner, first = max(
        (each for each in named if each[0].startswith(outer)), key=lambda each: len(each[0])
    )
    param = _cut(inner)
    if first["type"] == "missing":
        return InvalidRequest(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    reason = _cut(first["msg"].removeprefix("Value error, ").rstrip("."))
    if not param:  # the problem is in a combination of parameters
        return InvalidRequest(f"Invalid request: {reason}.", None, code)
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param, code)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "…"


def parameter_name(loc: Sequence[str | int], body: object, missing: bool = False) -> str:
    """A pydantic error location as a parameter name, such as `messages[0].content`.

    Parts that only name a union's member are left out. If `missing`, `body` lacks the last part.
    """
    name, here = "", body
    for number, part in enumerate(loc):
        if isinstance(part, int):
            if isinstance(here, list) and part < len(here):
                name, here = f"{name}[{part}]", here[part]
        elif isinstance(here, dict) and (part in here or (missing and number == len(loc) - 1)):
            name, here = f"{name}.{part}" if name else part, here.get(part)
    return name or str(loc[0] if loc else "")


def _from_http(error: HTTPException) -> APIError:
    known: dict[int, tuple[str, str]] = {
        404: ("Unknown request URL. Please check the URL for typos.", "unknown_url"),
        405: ("This method is not allowed for this URL.", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), None))
    found = APIError(message, headers=error.headers)
    found.status = error.status_code
    found.type = "invalid_request_error" if error.status_code < 500 else "server_error"
    found.code = code
    return found


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception that a route raises with OpenAI's error object."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        found = as_api_error(error)
        if isinstance(error, HTTPException) and found.status in (404, 405):
            found.message = f"{found.message} ({request.method} {request.url.path})"
        return error_response(found)

    handlers: tuple[Any, ...] = (APIError, HTTPException, ClientDisconnect)
    for kind in handlers:
        app.add_exception_handler(kind, handle)
