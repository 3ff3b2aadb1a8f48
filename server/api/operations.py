"""Routes for operators (/, /health, /metrics, /version) and errors for missing endpoints."""

from __future__ import annotations

from html import escape

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import NotSupported
from ..generation.services import Services
from ..version import version

_ABSENT = {
    "/v1/embeddings": "This server generates text; it does not offer embeddings.",
    "/v1/moderations": "This server does not offer moderation.",
    "/v1/images/generations": "This server generates text only.",
    "/v1/audio/transcriptions": "This server generates text only.",
    "/v1/audio/speech": "This server generates text only.",
}


_LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
    "metrics": "/metrics",
}


def operation_routes(services: Services) -> APIRouter:
    """The routes that need no key."""
    router = APIRouter()
    live = {"live": "/live"} if services.config.server.live_page else {}
    _add_index(router, {**live, **_LINKS})
    engine = services.engine

    def report() -> Response:
        found = engine.health.report
        status = 200 if found.is_ready else 503
        headers = {} if found.is_ready else {"Retry-After": str(found.retry_after)}
        body = msgspec.json.encode(found.as_dict())
        return Response(body, status, headers, "application/json")

    async def health() -> Response:
        return report()

    for path in ("/health", "/ready", "/ping"):
        # The first route serves both methods, so that a 405 lists both; the second is documented.
        router.add_api_route(path, health, methods=["GET", "HEAD"], include_in_schema=False)
        router.add_api_route(path, health)

    @router.get("/metrics")
    async def metrics() -> Response:
        clients = getattr(engine, "clients", [engine])
        for client, own in zip(clients, services.metrics.engines, strict=True):
            own.engine_restarts(client.health.report.restarts)
            own.lost_drafters(client.health.report.lost_drafters)
            if client.state == "ready":
                own.engine_ready(client.ready)
            elif client.state != "draining":
                own.engine_gone()
        return Response(services.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/version")
    async def server_version() -> Response:
        body = msgspec.json.encode({"version": version()})
        return Response(body, media_type="application/json")

    return router


def _add_index(router: APIRouter, paths: dict[str, str]) -> None:
    """Add `/`, the address printed at start-up: name, version and links to these paths."""

    async def index(request: Request) -> Response:
        prefix = request.scope.get("root_path", "").rstrip("/")
        links = {name: prefix + path for name, path in paths.items()}
        headers = {"Vary": "Accept"}
        if "text/html" in request.headers.get("accept", ""):  # a browser
            headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"
            return Response(_page(links), 200, headers, "text/html")
        body = {"name": "slipstream", "version": version(), "links": links}
        return Response(msgspec.json.encode(body), 200, headers, "application/json")

    # The first route serves both methods; the second is the one in the OpenAPI document.
    router.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/", index)


def _page(links: dict[str, str]) -> str:
    items = "".join(
        f'<li><a href="{escape(url)}">{escape(url)}</a> {name}</li>' for name, url in links.items()
    )
    title = f"Slipstream {escape(version())}"
    live = ""
    if "live" in links:
        live = f'<p><a href="{escape(links["live"])}">Chat, and watch the drafts</a></p>'
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f"<h1>{title}</h1><p>An OpenAI-compatible server: its base URL for clients is this "
        f"address with <code>/v1</code>.</p>{live}<ul>{items}</ul></html>"
    )


def absent_routes() -> APIRouter:
    """Routes of OpenAI's API that this server does not offer: 404 with an explanation."""
    router = APIRouter()

    async def absent(request: Request) -> Response:
        raise NotSupported(_ABSENT[request.scope["route"].path])

    for path in _ABSENT:
        router.add_api_route(path, absent, methods=["POST"], include_in_schema=False)
    return router
