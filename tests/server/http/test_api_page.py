"""The page of the API loads nothing from elsewhere."""

from __future__ import annotations

import re
import sys

import pytest

from ..api_fakes import ScriptedEngine, config_with, http_client, make_app


async def test_the_page_and_all_it_loads_come_from_here_without_a_key() -> None:
    app = make_app(ScriptedEngine(), config_with(api_key=("k",), root_path="/llm"))
    async with http_client(app) as client:
        page = await client.get("/llm/docs")
        assert page.status_code == 200 and "swagger" in page.text
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(loaded) == 3 and "//" not in "".join(loaded)
        for path in loaded:
            assert path.startswith("/llm/docs/assets/")
            asset = await client.get(path)
            assert asset.status_code == 200 and len(asset.content) > 1000
        assert "'/llm/openapi.json'" in page.text
        assert (await client.get("/llm/openapi.json")).status_code == 200
        assert (await client.get("/docs/assets/none")).json()["error"]["code"] == "unknown_url"
        assert (await client.get("/redoc")).status_code in (401, 404)
        assert (await client.get("/docsx")).status_code == 401


async def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi_offline", None)
    async with http_client(make_app(ScriptedEngine())) as client:
        reply = await client.get("/docs")
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["code"] == "not_supported" and "slipstream[docs]" in error["message"]
        assert (await client.get("/openapi.json")).status_code == 200
