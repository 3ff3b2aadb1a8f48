"""The OpenAPI document and page: bodies from pydantic models, replies from msgspec structs.

Routes read their bodies themselves (see `body`), so FastAPI cannot describe them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from pydantic import BaseModel

from ..errors import ErrorBody, NotSupported

Operation = tuple[str, str]  # method and path
_REF = "#/components/schemas/{model}"


class Documented(msgspec.Struct, frozen=True):
    body: type[BaseModel] | None
    reply: Any
    streams: bool = False
    media: str = "application/json"
    statuses: tuple[str, ...] = ("200",)  # statuses that have this reply
    serves: bool = True  # whether `model` in the body is the name of a served model


def install_openapi(
    app: FastAPI, documented: Mapping[Operation, Documented], models: Sequence[str] = ()
) -> None:
    """Add the schemas of these operations and the names of `models` to FastAPI's document."""
    plain = app.openapi
    complete: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not complete:
            complete.update(plain())
            _complete(complete, documented, {"type": "string", "enum": list(models)})
        return complete

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(
    document: dict[str, Any], documented: Mapping[Operation, Documented], names: dict[str, Any]
) -> None:
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
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = names
    for ((method, path), route), shape in zip(documented.items(), shapes[1:], strict=True):
        operation = document["paths"][path][method.lower()]
        if route.body is not None:
            operation["requestBody"] = _body(
                route.body, components, names if route.serves else None
            )
            operation["responses"] |= {"400": error, "404": error}
        content: dict[str, Any] = {route.media: {"schema": shape}}
        if route.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        reply = {"description": "The reply", "content": content}
        operation["responses"] |= dict.fromkeys(route.statuses, reply)


def _body(
    body: type[BaseModel], components: dict[str, Any], names: dict[str, Any] | None
) -> dict[str, Any]:
    """A reference to the body's schema, which is added to `components`."""
    schema = body.model_json_schema(ref_template=_REF)
    components.update(schema.pop("$defs", {}))
    if names is not None and "model" in schema["properties"]:
        schema["properties"]["model"] = names
    components[body.__name__] = schema
    reference = {"$ref": _REF.format(model=body.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


_ADVICE = (
    "The API page is not installed; `pip install 'slipstream[docs]'` adds it. "
    "The OpenAPI document is at /openapi.json."
)


def app_with_page(**settings: Any) -> FastAPI:
    """An application with `settings` and /docs.

    Without the extra `docs`, /docs answers 404 with the command that installs it.
    """
    try:
        from fastapi_offline import FastAPIOffline
    except ImportError:
        app = FastAPI(docs_url=None, redoc_url=None, **settings)
        app.add_api_route("/docs", _absent, include_in_schema=False)
        return app
    return FastAPIOffline(docs_url="/docs", redoc_url=None, static_url="/docs/assets", **settings)


async def _absent() -> Response:
    raise NotSupported(_ADVICE)
