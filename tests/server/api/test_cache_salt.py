"""`cache_salt` reaches the worker from every endpoint, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ..api_fakes import MODEL, ScriptedEngine, http_client, make_app

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["x", "y"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    "/v1/responses": {"input": "hi"},
}
LONGEST = "ä" * 256


async def post(engine: ScriptedEngine, path: str, **changes: Any) -> Any:
    async with http_client(make_app(engine)) as client:
        return await client.post(path, json={"model": MODEL, **BODIES[path], **changes})


@pytest.mark.parametrize("path", BODIES)
async def test_the_salt_reaches_the_worker_with_every_choice(path: str) -> None:
    for change, salt in (({"cache_salt": LONGEST}, LONGEST), ({"cache_salt": None}, ""), ({}, "")):
        engine = ScriptedEngine()
        assert (await post(engine, path, **change)).status_code == 200
        assert engine.requests and {request.cache_salt for request in engine.requests} == {salt}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wrong", ["", LONGEST + "a", 5, True, ["a"], {"a": "b"}])
async def test_a_wrong_salt_is_a_400_that_names_it(path: str, wrong: Any) -> None:
    engine = ScriptedEngine()
    response = await post(engine, path, cache_salt=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"
    assert not engine.requests
