"""Serves the page /live and the files that it loads. It knows nothing of chats or metrics.

The page is plain HTML, CSS and JavaScript from this package: it loads nothing from elsewhere, and
its content security policy forbids it to.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response

LIVE_PATH = "/live"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# No script or style in the document, no string that becomes HTML, nothing from or to elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def live_routes() -> APIRouter:
    """The page and its files, which are read once. They need no key, but what they ask for does."""
    router = APIRouter()
    contents = {
        file.name: file.read_bytes() for file in files(__package__).joinpath("files").iterdir()
    }

    def answer(name: str) -> Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(contents[name], headers={**_HEADERS, "Content-Type": kind})

    async def page() -> Response:
        return answer("index.html")

    async def file(name: str) -> Response:
        if name not in contents or name == "index.html":
            raise HTTPException(404)
        return answer(name)

    for path, route in ((LIVE_PATH, page), (LIVE_PATH + "/{name}", file)):
        router.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)
    return router
