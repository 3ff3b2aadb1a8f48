"""POST /v1/speculator: who may, what decides, and that a trial always ends."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from slipstream.runner.messages import AddRequest, RequestOutput
from slipstream.server.request_stream import EngineDead, SpeculatorRefused

from ..api_fakes import ScriptedEngine, config_with, http_client, make_app
from ..asgi_client import OpenRequest

ADMIN = {"authorization": "Bearer root"}
OLD, GOOD, BAD = 2, 3, 1  # drafts of 3 that each head gets accepted


class SwappingEngine(ScriptedEngine):
    """Heads are called by the number of drafts they get accepted."""

    def __init__(self) -> None:
        super().__init__(self._reply)
        self.accepted, self.other = OLD, OLD
        self.loaded: int | None = None
        self.asked: list[str] = []
        self.num_resets = 0
        self.wait = asyncio.Event()
        self.wait.set()
        self.stall = ""  # the action that takes a while
        self.drafter: str | None = "old"
        self.drafter_fallback: str | None = None
        self.lost = False  # the worker is another one, in which nothing was loaded

    def _reply(self, request: AddRequest) -> list[RequestOutput | Exception | float]:
        output = RequestOutput(request.request_id, [9] * (self.accepted + 1))
        output.num_draft_tokens, output.num_accepted_tokens = 3, self.accepted
        output.finish_reason = "length"
        return [output]

    async def change_speculator(self, action: str, model: str = "") -> None:
        self.asked.append(f"{action} {model}".strip())
        await self.wait.wait()
        if action == self.stall:
            await asyncio.sleep(0.1)
        if self.lost and action != "load":
            raise SpeculatorRefused("no drafter is being tried")
        if model.startswith("broken"):
            raise SpeculatorRefused("its shape is another")
        if model == "dead":
            raise EngineDead("the worker was killed")
        if action == "load":
            self.loaded = int(model) if model.isdigit() else None
        elif action == "try":
            if self.loaded is None:
                raise SpeculatorRefused("the memory is too small")
            self.accepted, self.other = self.loaded, self.accepted
        elif action == "revert":
            self.accepted = self.other

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


async def post(
    engine: SwappingEngine, body: dict[str, Any], headers: Any = ADMIN, **server: Any
) -> httpx.Response:
    config = config_with(**({"admin_api_key": ("root",)} | server))
    async with http_client(make_app(engine, config)) as client:
        return await client.post("/v1/speculator", json=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "swapped", "why", "asked", "after"),
    [
        ({"model": str(GOOD)}, True, "not worse", ["load 3", "try", "keep"], GOOD),
        ({"model": str(OLD)}, True, "not worse", ["load 2", "try", "keep"], OLD),
        ({"model": str(BAD)}, False, "worse", ["load 1", "try", "revert"], OLD),
        ({"model": str(BAD), "force": True}, True, "forced", ["load 1", "try", "keep"], BAD),
    ],
)
async def test_the_probe_decides(
    body: dict[str, Any], swapped: bool, why: str, asked: list[str], after: int
) -> None:
    engine = SwappingEngine()
    reply = (await post(engine, body)).json()
    assert reply["swapped"] is swapped and why in reply["reason"]
    assert reply["acceptance"]["before"]["mean_acceptance_length"] == 1 + OLD
    assert reply["acceptance"]["after"]["mean_acceptance_length"] == 1 + int(body["model"])
    assert engine.asked == asked and engine.accepted == after
    probes = [request for request in engine.requests]
    assert len(probes) == 2 * 32 and all(r.sampling.temperature == 0 for r in probes)
    assert engine.num_resets == 3  # before each probe, and when it is settled


async def test_it_needs_the_admins_key() -> None:
    engine = SwappingEngine()
    body = {"model": "3"}
    assert (await post(engine, body, admin_api_key=())).status_code == 404
    for headers in ({}, {"authorization": "Bearer client"}, {"authorization": "Basic root"}):
        reply = await post(engine, body, headers, api_key=("client",))
        assert reply.status_code == 401, reply.text
    assert (await post(engine, body, api_key=("client",))).status_code == 200
    assert engine.asked == ["load 3", "try", "keep"]


async def test_the_admins_key_opens_nothing_else() -> None:
    config = config_with(admin_api_key=("root",), api_key=("client",))
    async with http_client(make_app(SwappingEngine(), config)) as client:
        assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401


async def test_a_head_that_cannot_be_loaded_is_the_callers_400() -> None:
    engine = SwappingEngine()
    reply = await post(engine, {"model": "broken"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == "its shape is another." and error["param"] == "model"
    assert engine.requests == [] and engine.asked == ["load broken"]  # nothing was measured
    for body in ({}, {"model": ""}, {"model": 3}, {"model": "3", "force": "yes"}):
        assert (await post(engine, body)).status_code == 400
    assert (await post(engine, {"model": "dead"})).status_code == 503
    assert engine.accepted == OLD


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "a\xed\xa0\x80"}', "half of a surrogate pair"),
        (b'{"model": "broken' + b"a" * 10_000 + b'"}', "its shape is another"),
    ],
)
async def test_a_name_that_is_no_text_is_a_400_of_openais_form(body: bytes, words: str) -> None:
    engine = SwappingEngine()
    config = config_with(admin_api_key=("root",))
    async with http_client(make_app(engine, config)) as client:
        headers = ADMIN | {"content-type": "application/json"}
        reply = await client.post("/v1/speculator", content=body, headers=headers)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error" and words in error["message"]
        assert (await client.post("/v1/speculator", json={"model": "3"}, headers=ADMIN)).is_success


async def test_a_head_for_which_there_is_no_room_is_dropped() -> None:
    engine = SwappingEngine()
    reply = await post(engine, {"model": "large"})
    assert reply.status_code == 400 and "memory is too small" in reply.text
    assert engine.asked == ["load large", "try", "revert"] and engine.accepted == OLD


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_probe_that_fails_reverts(failing: int) -> None:
    engine = SwappingEngine()
    replies = engine.script

    def fail(request: AddRequest) -> list[RequestOutput | Exception | float]:
        if failing == 1 or "try" in engine.asked:
            return [RequestOutput(request.request_id, [], finish_reason="error", error="Broken.")]
        return replies(request)

    engine.script = fail
    assert (await post(engine, {"model": "3"})).status_code == 503
    assert engine.asked == ["load 3", *["try"][: failing - 1], "revert"]
    assert engine.accepted == OLD


async def test_one_trial_at_a_time() -> None:
    engine = SwappingEngine()
    engine.wait.clear()
    app = make_app(engine, config_with(admin_api_key=("root",)))
    async with http_client(app) as client:
        first = asyncio.create_task(
            client.post("/v1/speculator", json={"model": "3"}, headers=ADMIN)
        )
        while not engine.asked:
            await asyncio.sleep(0.01)
        second = await client.post("/v1/speculator", json={"model": "1"}, headers=ADMIN)
        assert second.status_code == 409 and second.json()["error"]["code"] == "speculator_busy"
        told = (await client.get("/v1/speculator", headers=ADMIN)).json()
        assert told == {"method": "ngram", "model": "old", "on_trial": "3", "fallback": None}
        engine.wait.set()
        assert (await first).json()["swapped"] is True
        told = (await client.get("/v1/speculator", headers=ADMIN)).json()
        assert told["on_trial"] is None
        assert (await client.get("/v1/speculator")).status_code == 401
    assert engine.asked == ["load 3", "try", "keep"]


async def test_two_at_the_same_moment_are_one_trial() -> None:
    engine = SwappingEngine()
    app = make_app(engine, config_with(admin_api_key=("root",)))
    async with http_client(app) as client:
        asks = [
            client.post("/v1/speculator", json={"model": name}, headers=ADMIN) for name in "331"
        ]
        replies = await asyncio.gather(*asks)
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409]
    assert len(engine.asked) == 3


@pytest.mark.parametrize("model", [GOOD, BAD])
async def test_a_worker_that_knows_nothing_of_the_trial_is_no_fault_of_the_callers(
    model: int,
) -> None:
    """It was started again after the last probe, and refuses to settle what it did not begin."""
    engine = SwappingEngine()
    script = engine.script

    def play(request: AddRequest) -> list[RequestOutput | Exception | float]:
        engine.lost = "try" in engine.asked
        return script(request)

    engine.script = play
    reply = await post(engine, {"model": str(model)})
    assert reply.status_code == 503
    error = reply.json()["error"]
    assert error["code"] == "engine_dead" and error["type"] == "service_unavailable"
    assert engine.asked[2:] == ["keep" if model == GOOD else "revert"]


@pytest.mark.parametrize("stage", ["load", "before", "try", "after", "keep"])
async def test_a_client_that_hangs_up_ends_the_trial(stage: str) -> None:
    engine = SwappingEngine()
    engine.stall = stage
    script = engine.script

    def play(request: AddRequest) -> list[RequestOutput | Exception | float]:
        here = "after" if "try" in engine.asked else "before"
        return [float("inf")] if here == stage else script(request)

    engine.script = play
    app = make_app(engine, config_with(admin_api_key=("root",)))
    request = OpenRequest(
        app, "/v1/speculator", {"model": "3"}, [(b"authorization", b"Bearer root")]
    )

    def is_there() -> bool:
        if stage in ("before", "after"):
            return len(engine.open) == 8 and ("try" in engine.asked) == (stage == "after")
        return engine.asked[-1:] == ["load 3" if stage == "load" else stage]

    while not is_there():
        await asyncio.sleep(0.001)
    await request.hang_up()
    settled = ["keep" if stage == "keep" else "revert"]
    tried = ["load 3", *(["try"] if stage in ("try", "after", "keep") else [])]
    assert engine.asked == tried + settled and not engine.open
    assert engine.accepted == (GOOD if stage == "keep" else OLD)
    engine.stall, engine.script = "", script
    async with http_client(app) as client:
        again = await client.post("/v1/speculator", json={"model": "3"}, headers=ADMIN)
    assert again.status_code == 200, again.text
