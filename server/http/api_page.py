"""Owns /docs, the page that shows the API: its scripts come from this machine, or there is none.

FastAPI's own page loads them from elsewhere, which a server behind a firewall cannot.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from ..errors import NotSupported

_ADVICE = (
    "The API page is not installed; `pip install 'slipstream[docs]'` adds it. "
    "The OpenAPI document is at /openapi.json."
)


def app_with_page(**settings: Any) -> FastAPI:
    """An application with `settings` and /docs; that says what to install if the extra lacks."""
    try:
        from fastapi_offline import FastAPIOffline
    except ImportError:
        app = FastAPI(docs_url=None, redoc_url=None, **settings)
        app.add_api_route("/docs", _absent, include_in_schema=False)
        return app
    return FastAPIOffline(docs_url="/docs", redoc_url=None, static_url="/docs/assets", **settings)


async def _absent() -> Response:
    raise NotSupported(_ADVICE)
