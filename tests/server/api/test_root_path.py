"""Behind a proxy that strips a prefix, and behind one that does not."""

from __future__ import annotations

from ..api_fakes import MODEL, ScriptedEngine, config_with, http_client, make_app


async def test_routes_keys_and_document_know_the_prefix() -> None:
    app = make_app(ScriptedEngine(), config_with(root_path="/llm/", api_key=("secret",)))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
    async with http_client(app) as client:
        for prefix in ("", "/llm"):
            assert (await client.get(f"{prefix}/ready")).status_code == 200
            url = f"{prefix}/v1/completions"
            assert (await client.post(url, json=body)).status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert (await client.post(url, json=body, headers=key)).status_code == 200
        document = (await client.get("/openapi.json")).json()
    assert {"url": "/llm"} in document["servers"]
