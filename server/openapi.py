"""The OpenAPI document: bodies from the pydantic models, replies from the msgspec structs.

Routes read their bodies themselves (see `body`), so FastAPI does not know these shapes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from .errors import ErrorBody

_REF = "#/components/schemas/{model}"


class Documented(msgspec.Struct, frozen=True):
    """What one route takes and gives."""

    body: type[BaseModel]
    reply: Any
    streams: bool = False


def install_openapi(app: FastAPI, documented: dict[str, Documented]) -> None:
    """Complete FastAPI's document with these routes' shapes, by path."""
    plain = app.openapi
    complete: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not complete:
            complete.update(plain())
            _complete(complete, documented)
        return complete

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], documented: dict[str, Documented]) -> None:
    components = document.setdefault("components", {}).setdefault("schemas", {})
    replies = [ErrorBody, *(route.reply for route in documented.values())]
    shapes, found = msgspec.json.schema_components(
        replies, ref_template="#/components/schemas/{name}"
    )
    components.update(found)
    error = {"description": "Refused", "content": {"application/json": {"schema": shapes[0]}}}
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = error
    for (path, route), shape in zip(documented.items(), shapes[1:], strict=True):
        schema = route.body.model_json_schema(ref_template=_REF)
        components.update(schema.pop("$defs", {}))
        components[route.body.__name__] = schema
        operation = document["paths"][path]["post"]
        reference = {"$ref": _REF.format(model=route.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
        content: dict[str, Any] = {"application/json": {"schema": shape}}
        if route.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        operation["responses"]["200"] = {"description": "The reply", "content": content}
        for status in ("400", "404"):
            operation["responses"][status] = error
