"""Middleware around all routes: request ids, counting, errors, API keys, body size.

They are plain ASGI wrappers, which cost little, because every chunk of every stream passes them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...configs.logs import ACCESS_LOGGER
from ...configs.logs import request_id as current_request
from ..errors import (
    AuthenticationFailed,
    BodiesTooLarge,
    BodyTooLarge,
    as_api_error,
    error_response,
)
from ..metrics import Metrics

access_log = logging.getLogger(ACCESS_LOGGER)

ADMIN_PATHS = {"/v1/speculator"}  # their routes require the admin key
OPEN_PATHS = {
    *("/", "/live", "/health", "/ready", "/ping", "/metrics", "/version", "/docs", "/openapi.json")
}
_MAX_BODIES = 16  # bodies of maximum size that may be held at once
_MAX_LOGGED_PATH = 512  # characters
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestScope:
    """The outermost middleware: assigns request ids, counts responses, writes the access log.

    `root_path` is the path prefix that a proxy strips. Requests that still have it are served, too.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, log: bool = False, root_path: str = ""
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        current_request.set(request_id)
        began = time.monotonic()
        status = 499  # stays if the client disconnects before a response

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round(1000 * (time.monotonic() - began)))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            handler = getattr(route, "path", None) or "other"
            self._metrics.http(scope["method"] if handler != "other" else "any", handler, status)
            if self._log:
                self._write(scope, status, time.monotonic() - began, request_id)

    @staticmethod
    def _write(scope: Scope, status: int, seconds: float, request_id: str) -> None:
        client = scope.get("client") or ("",)
        path = _logged_path(scope)
        fields = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            "client": client[0],
        }
        access_log.info(
            "%s %s %d %.3f s",
            *(scope["method"], path, status, seconds),
            extra={"request_id": request_id, "fields": fields},
        )


def _logged_path(scope: Scope) -> str:
    """The path as the client sent it, still percent-encoded: no space or line break, and short."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.decode("latin-1")
    return path if len(path) <= _MAX_LOGGED_PATH else f"{path[:_MAX_LOGGED_PATH]}…"


class Faults:
    """Turns unhandled exceptions into a 500 with OpenAI's error object, and logs the traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            response = error_response(as_api_error(error))
            if started or scope["type"] != "http":
                raise
            await response(scope, receive, send)


class Keys:
    """Requires an API key, if any is set."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and not _is_open(scope):
            try:
                self._keys.check(Headers(scope=scope))
            except AuthenticationFailed as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no key, or its route checks the key."""
    path = route_path(scope)
    return (
        scope["method"] == "OPTIONS"
        or path in OPEN_PATHS
        or path.startswith(("/docs/", "/live/"))  # the files that these pages load
        or path in ADMIN_PATHS
    )


def route_path(scope: Scope) -> str:
    """The path without the proxy's prefix."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


class BodyLimit:
    """Refuses bodies larger than `max_bytes`, by their content length or while they arrive.

    The bodies of all open requests together are limited, too, because each is kept until its
    request ends.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total = _MAX_BODIES * max_bytes
        self._total = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isascii() and stated.isdecimal() and int(stated[:20]) > self._max_bytes:
            await error_response(BodyTooLarge(self._max_bytes))(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                seen += size
                self._total += size
                if seen > self._max_bytes:
                    raise BodyTooLarge(self._max_bytes)
                if self._total > self._max_total:
                    raise BodiesTooLarge(self._max_total)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._total -= seen


class KeyRing:
    """The accepted keys. The time of a comparison does not depend on which key matches, if any."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so the time of a comparison does not depend on the keys.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """Raise AuthenticationFailed unless `Authorization: Bearer KEY` has an accepted key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # `strip()` would also remove bytes of UTF-8 characters that Latin-1 reads as spaces.
        given = token.strip(" \t") if scheme.lower() == "bearer" else ""
        digest = _digest(given.encode("latin-1"))  # the bytes that the client sent
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationFailed(bool(given))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
