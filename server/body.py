"""Reads a request's JSON body into its model; whatever is wrong with it is the client's 400.

msgspec does the parsing: it refuses NaN, lone surrogates, bytes that are no UTF-8, and numbers no
machine can hold. Depth is bounded, since what comes after recurses over it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .errors import (
    BodyTooSlow,
    MalformedBody,
    UnsupportedEncoding,
    UnsupportedMediaType,
    invalid_value,
)

logger = logging.getLogger("slipstream.http")

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 64
_MAX_NAMES = 1000
_LONE_SURROGATE = "a string of it holds half of a surrogate pair, which is no character"


class BodyReader:
    """Reads bodies; remembers which unknown parameters the log has."""

    def __init__(self, timeout: float = 60.0) -> None:
        """`timeout` in seconds, for a whole body; 0 waits for ever."""
        self._timeout = timeout or None
        self._logged: set[str] = set()

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as `model`. Unknown fields are accepted and logged once each."""
        body = validated(parse_json(await self._bytes(request)), model)
        for name in body.model_extra or ():
            if name not in self._logged and len(self._logged) < _MAX_NAMES:
                self._logged.add(name)
                logger.warning("the parameter %.80r is not known and has no effect", name)
        return body

    async def _bytes(self, request: Request) -> bytes:
        content_type = request.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        if kind and kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType(content_type)
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise UnsupportedEncoding(coding)
        try:
            async with asyncio.timeout(self._timeout):
                return await request.body()
        except TimeoutError:
            raise BodyTooSlow(self._timeout or 0) from None


def validated(value: Any, model: type[Model]) -> Model:
    """`value` as `model`, or InvalidRequest that names the parameter."""
    if not isinstance(value, dict):
        raise MalformedBody("it is not a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_value(error, value) from None


def parse_json(data: bytes) -> Any:
    """JSON bytes as plain values; MalformedBody if they are none."""
    if not data.strip():
        raise MalformedBody("it is empty")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise MalformedBody("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(_why_malformed(data, error)) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _too_deep(value):
        raise MalformedBody(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def _why_malformed(data: bytes, error: Exception) -> str:
    if _has_lone_surrogate(data):
        return _LONE_SURROGATE
    try:
        data.decode()
    except UnicodeDecodeError as bad:  # msgspec counts from the beginning of a string
        return f"it is not UTF-8: byte 0x{data[bad.start]:02x} in position {bad.start}"
    return str(error).rstrip(".")


def _has_lone_surrogate(data: bytes) -> bool:
    """Whether that alone is wrong with it: msgspec calls it something else."""
    try:
        json.dumps(json.loads(data), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass
    return False


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += item.values()
            elif isinstance(item, list):
                children += item
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True
