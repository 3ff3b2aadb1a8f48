"""Keys of every script, compared as the bytes that a client sends; the admin's like a client's."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from slipstream.server.errors import AuthenticationFailed
from slipstream.server.http.middleware import KeyRing

from ..api_fakes import ScriptedEngine, config_with, http_client, make_app

KEYS = ("plain", "ключ", "à", "秘密 key", "naïve\udcff")  # the last: from bytes that are not UTF-8


def header(key: bytes) -> Headers:
    return Headers(raw=[(b"authorization", b"Bearer " + key)])


@pytest.mark.parametrize("key", KEYS)
def test_a_key_matches_its_own_bytes_alone(key: str) -> None:
    sent = key.encode("utf-8", "surrogateescape")
    ring = KeyRing(("other", key))
    for accepted in (sent, b"  " + sent + b" \t"):
        ring.check(header(accepted))
    for wrong in (sent + b"x", sent[:-1], b"", "other?".encode("utf-16"), sent.hex().encode()):
        with pytest.raises(AuthenticationFailed):
            ring.check(header(wrong))


@pytest.mark.parametrize("key", KEYS)
async def test_both_kinds_of_key_may_be_of_any_script(key: str) -> None:
    app = make_app(ScriptedEngine(), config_with(api_key=("client", key), admin_api_key=(key,)))
    sent = {b"authorization": b"Bearer " + key.encode("utf-8", "surrogateescape")}
    async with http_client(app) as client:
        assert (await client.get("/v1/models", headers=sent)).status_code == 200
        # The fake engine has no drafter to tell of: past the key, it is another error than 401.
        body = {"model": 5}
        admin = await client.post("/v1/speculator", json=body, headers=sent)
        assert admin.status_code == 400 and "model" in admin.text
        wrong = {b"authorization": b"Bearer client"}
        assert (await client.post("/v1/speculator", json=body, headers=wrong)).status_code == 401
