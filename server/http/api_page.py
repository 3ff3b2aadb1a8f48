"""The page /docs, which shows the API. Its scripts are served locally.

FastAPI's own page loads scripts from the internet, which does not work behind a firewall.
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
