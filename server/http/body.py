"""Reads a request's JSON body into its model; an invalid body is answered with a 400.

msgspec parses; it refuses NaN, lone surrogates, invalid UTF-8 and numbers out of range. The nesting
depth is bounded because later code recurses over the value, and the number of values because
parsing holds Python's global lock. Large bodies are parsed off the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..errors import (
    MalformedBody,
    RequestTooSlow,
    UnsupportedEncoding,
    UnsupportedMediaType,
    invalid_value,
)
from ..json_text import MAX_DEPTH, too_deep, too_many
from ..off_loop import by_size
from ..openai_types.common import SizedBody

logger = logging.getLogger("slipstream.http")

Model = TypeVar("Model", bound=BaseModel)

_MAX_NAMES = 1000
_MAX_NAMES_AT_ONCE = 20
_PIECE = 1 << 20  # bytes searched in one call
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_LONE_SURROGATE = "one of its strings contains half of a surrogate pair, which is not a character"


class BodyReader:
    """Reads bodies, and logs each unknown parameter once."""

    def __init__(self, timeout: float = 60.0) -> None:
        """`timeout` is the time in seconds for receiving a body; 0 disables it."""
        self._timeout = timeout or None
        self._logged: set[str] = set()

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as `model`. Unknown fields are accepted and logged.

        Raises UnsupportedMediaType, UnsupportedEncoding, RequestTooSlow, InvalidRequest.
        """
        data = await self._bytes(request)
        return await by_size(len(data), self._parsed, data, model)

    def _parsed(self, data: bytes, model: type[Model]) -> Model:
        body = validated(parse_json(data), model)
        if isinstance(body, SizedBody):
            body.note_size(len(data))
        for name in islice(body.model_extra or (), _MAX_NAMES_AT_ONCE):
            name = name[:80]
            if name not in self._logged and len(self._logged) < _MAX_NAMES:
                self._logged.add(name)
                logger.warning("ignoring the unknown parameter %r", name)
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
            raise RequestTooSlow("request body", self._timeout or 0) from None


def validated(value: Any, model: type[Model]) -> Model:
    """`value` as `model`. Raises InvalidRequest, which names the invalid parameter."""
    if not isinstance(value, dict):
        raise MalformedBody("it is not a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_value(error, value) from None


def parse_json(data: bytes) -> Any:
    """Parse JSON into plain Python values. Raises MalformedBody."""
    if not data.strip():
        raise MalformedBody("it is empty")
    if (excess := too_many(data)) is not None:
        raise MalformedBody(f"it has {excess}")
    try:
        value = _decoded(data)
    except RecursionError:
        raise MalformedBody("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(_why_malformed(data, error)) from None
    if too_deep(data, value):
        raise MalformedBody(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def _decoded(data: bytes) -> Any:
    """Decode JSON with the garbage collector off, which would scan the growing lists repeatedly.

    No other thread runs meanwhile, so turning it off affects nothing else.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data)
    finally:
        if collects:
            gc.enable()


def _why_malformed(data: bytes, error: Exception) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as bad:  # msgspec reports positions within a string
        if data[bad.start] == 0xED and data[bad.start + 1 : bad.start + 2] >= b"\xa0":
            return _LONE_SURROGATE
        return f"it is not UTF-8: byte 0x{data[bad.start]:02x} in position {bad.start}"
    if _has_lone_surrogate(data):
        return _LONE_SURROGATE
    return str(error).rstrip(".")


def _has_lone_surrogate(data: bytes) -> bool:
    """Whether an escape is half of a surrogate pair, which msgspec reports in other words."""
    data = data.replace(b"\\\\", b"")  # an escaped backslash does not start an escape
    for start in range(0, len(data), _PIECE):
        found = _HALF.search(data, start, start + _PIECE + 12)  # include the second half of a pair
        if found is not None and found.start() < start + _PIECE:
            return True
    return False
