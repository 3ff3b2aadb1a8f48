"""Random bodies and random bytes: answers below 500, an error object when refused, nothing left."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.server.openai_types.chat import ChatCompletionRequest
from slipstream.server.openai_types.completions import CompletionRequest
from slipstream.server.openai_types.responses import ResponsesRequest

from ..api_fakes import MODEL, ScriptedEngine, http_client, make_app

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
FIELDS = sorted(
    {
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *ResponsesRequest.model_fields,
        *("tokens", "surprise"),
    }
)
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40]),
    st.floats(-1e308, 1e308),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
KEYS = st.one_of(st.text(max_size=5), st.sampled_from(["type", "role", "content", "name", "0"]))
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4), max_leaves=8
)
# Values that come near to what each field wants, so that the fuzz gets past the first check.
LIKELY: dict[str, Any] = {
    "model": st.just(MODEL),
    "prompt": st.one_of(st.text(max_size=20), st.lists(st.integers(0, 300), max_size=5)),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"])},
            optional={"content": st.one_of(st.text(max_size=9), VALUES), "name": VALUES},
        ),
        max_size=3,
    ),
    "max_tokens": st.integers(-1, 8),
    "logit_bias": st.dictionaries(st.integers(-2, 300).map(str), NUMBERS, max_size=3),
    "stop": st.lists(st.text(max_size=2), max_size=3),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])}),
}
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    st.fixed_dictionaries(
        {
            "model": LIKELY["model"],
            "prompt": LIKELY["prompt"],
            "messages": LIKELY["messages"],
            "input": LIKELY["prompt"],
        },
        optional={
            field: LIKELY.get(field, VALUES) for field in FIELDS if field not in {*LIKELY, "input"}
        }
        | {field: LIKELY[field] for field in ("max_tokens", "logit_bias", "stop")},
    ),
)
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow])


ENGINE = ScriptedEngine()
APP = make_app(ENGINE)


async def check(path: str, data: bytes) -> int:
    async with http_client(APP) as client:
        response = await client.post(path, content=data)
    assert response.status_code < 500, (path, data, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    else:
        assert '"error"' not in response.text[:10]
    assert not ENGINE.open
    return response.status_code


@RELAXED
@given(path=st.sampled_from(PATHS), body=BODIES)
async def test_random_bodies_never_break_the_server(path: str, body: dict[str, Any]) -> None:
    await check(path, json.dumps(body).encode())


@RELAXED
@given(path=st.sampled_from(PATHS), data=st.binary(max_size=40))
async def test_random_bytes_are_refused(path: str, data: bytes) -> None:
    assert await check(path, data) in (400, 404)
