"""GET /v1/models and /v1/models/{id}: the served model, listed under each of its names."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from ..generation.services import Services


class ModelCard(msgspec.Struct):
    """A model object of OpenAI's API, with vLLM's `max_model_len`."""

    id: str
    created: int
    root: str
    max_model_len: int | None = None
    parent: str | None = None
    object: str = "model"
    owned_by: str = "slipstream"


class ModelList(msgspec.Struct):
    """The reply of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


def model_routes(services: Services) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> ModelCard:
        state = services.engine.state
        known = state != "starting" and state != "failed"
        length = services.engine.ready.max_model_len if known else None
        return ModelCard(name, services.created, services.config.model.model, length)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList([card(name) for name in services.model_names]))

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        services.check_model(model)
        return _json(card(model))

    return router


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
