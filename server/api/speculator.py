"""POST /v1/speculator tries another draft head in the running server; GET reports the present one.

The new head is kept if its acceptance on built-in probe prompts is not worse (see `head_verdict`).
Probes run as ordinary requests beside all others. Weights are swapped between two steps, so that
other requests only see different drafts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from ..drafters.acceptance import MeasuredPrompt, MeasurementFailed, measure_acceptance
from ..drafters.head_verdict import Measurement, judge
from ..drafters.training_prompts import heldout_prompts, tokenize_prompts
from ..errors import APIError, EngineStopped, InvalidRequest, NotSupported, as_api_error
from ..generation.services import Engine, Services
from ..http.middleware import KeyRing
from ..http.sse import unless_disconnected
from ..openai_types.common import Body
from ..request_stream import EngineDead, SpeculatorRefused

log = logging.getLogger("slipstream.speculator")

_PER_DOMAIN, _PROBE_TOKENS = 4, 48


class SpeculatorRequest(Body):
    """The body of POST /v1/speculator."""

    model: str = Field(min_length=1)  # folder or hub id of a checkpoint
    force: bool = False  # keep it even if the probe finds it worse


class SpeculatorReply(msgspec.Struct):
    """The reply of POST /v1/speculator: the decision and the acceptance rates behind it."""

    swapped: bool
    reason: str
    model: str  # the head that was tried
    acceptance: dict[str, Any]  # "before" and "after"


class SpeculatorState(msgspec.Struct):
    """The reply of GET /v1/speculator: the present drafter."""

    method: str  # "off" without a drafter
    model: str | None  # as configured or kept since; a restarted worker loads it
    on_trial: str | None  # head being loaded or measured
    fallback: str | None  # why another drafter had to replace it


class SpeculatorBusy(APIError):
    status = 409
    type = "invalid_request_error"
    code = "speculator_busy"

    def __init__(self) -> None:
        super().__init__("Another drafter is on trial; try again when its trial has ended.")


def speculator_routes(services: Services) -> APIRouter:
    """The routes; they require the admin API key, not a client's key."""
    router = APIRouter()
    keys = KeyRing(services.config.server.admin_api_key)
    gate = asyncio.Lock()
    trial = Trial(services)

    @router.post("/v1/speculator")
    async def change_speculator(request: Request) -> Response:
        _check_key(request, keys)
        body = await services.bodies.read(request, SpeculatorRequest)
        services.check_ready()
        if gate.locked():
            raise SpeculatorBusy
        async with gate:
            reply = await unless_disconnected(request, trial.run(body.model, body.force))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    @router.get("/v1/speculator")
    async def report_speculator(request: Request) -> Response:
        _check_key(request, keys)
        engine = services.engine
        method = engine.ready.speculative_method
        state = SpeculatorState(method, engine.drafter, trial.model, engine.drafter_fallback)
        return Response(msgspec.json.encode(state), media_type="application/json")

    return router


def _check_key(request: Request, keys: KeyRing) -> None:
    if not keys:
        raise NotSupported(
            "Drafter swapping is disabled; start the server with --admin-api-key to enable it."
        )
    keys.check(request.headers)


class Trial:
    """Loads a head, measures the present one and then the new one, and keeps one of them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._prompts: list[MeasuredPrompt] = []
        self.model: str | None = None  # the head on trial

    async def run(self, model: str, force: bool) -> SpeculatorReply:
        """Run a whole trial; `force` keeps the new head whatever the verdict.

        Raises InvalidRequest if the head cannot be loaded, EngineStopped if the worker dies. If
        cancelled, it restores the old head first.
        """
        engine = self._services.engine
        self.model = model
        try:
            await self._load(engine, model)  # refuses a head that does not fit
            before, after = await self._measure(engine)
            keep, reason = judge(before, after, force)
            await _to_the_end(self._settle(engine, "keep" if keep else "revert"))
        except SpeculatorRefused as error:
            raise InvalidRequest(f"{error}.", "model", "invalid_value") from None
        except EngineDead as error:
            raise as_api_error(error) from None
        except MeasurementFailed as error:
            raise EngineStopped(str(error)) from None
        finally:
            self.model = None
        log.info("drafter %s %s: %s", model, "kept" if keep else "not kept", reason)
        figures = {"before": before.tally.as_dict(), "after": after.tally.as_dict()}
        return SpeculatorReply(keep, reason, model, figures)

    async def _load(self, engine: Engine, model: str) -> None:
        try:
            await engine.change_speculator("load", model)
        except asyncio.CancelledError:  # the worker loads it nevertheless
            await _to_the_end(self._give_up(engine))
            raise

    async def _measure(self, engine: Engine) -> tuple[Measurement, Measurement]:
        """Measure the present head, swap in the loaded one, measure it, too."""
        try:
            before = await self._probe(engine)
            await engine.change_speculator("try")
            return before, await self._probe(engine)
        except BaseException:
            await _to_the_end(self._give_up(engine))
            raise

    async def _give_up(self, engine: Engine) -> None:
        with contextlib.suppress(EngineDead, EngineStopped):  # the trial ended with its worker
            await self._settle(engine, "revert")

    @staticmethod
    async def _settle(engine: Engine, action: str) -> None:
        """End the trial with "keep" or "revert".

        A refusal here means that the worker was restarted, which is not the client's fault.
        """
        try:
            await engine.change_speculator(action)
        except SpeculatorRefused as error:
            raise EngineStopped(str(error)) from None
        engine.reset_prefix_cache()  # cached KV of drafts belongs to the other head

    async def _probe(self, engine: Engine) -> Measurement:
        engine.reset_prefix_cache()
        stop = sorted(self._services.tokenizer.eos_ids | set(engine.ready.eos_token_ids))
        room = engine.ready.max_model_len
        if not self._prompts:
            self._prompts = await asyncio.to_thread(self._read)
        prompts = [p for p in self._prompts if len(p.token_ids) + _PROBE_TOKENS < room]
        if not prompts:
            prompts = [MeasuredPrompt(tuple(p.token_ids[: room // 2])) for p in self._prompts]
        name = f"probe-{uuid.uuid4().hex[:8]}"
        most = min(_PROBE_TOKENS, room // 2 - 1)
        found = Measurement()
        await measure_acceptance(engine, prompts, 0.0, most, stop, on_output=found.add, name=name)
        return found

    def _read(self) -> list[MeasuredPrompt]:
        services = self._services
        by_domain: dict[str, int] = {}
        chosen = []
        for prompt in heldout_prompts():
            by_domain[prompt.domain] = by_domain.get(prompt.domain, 0) + 1
            if by_domain[prompt.domain] <= _PER_DOMAIN:
                chosen.append(prompt)
        if services.template.source is None:  # without a chat template, use plain texts
            texts = [str(prompt.messages[0]["content"]) for prompt in chosen]
            ids = services.tokenizer.encode_batch(texts)
        else:
            ids = tokenize_prompts(chosen, services.tokenizer, services.template)
        return [MeasuredPrompt(tuple(found)) for found in ids]


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end even if cancelled; the cancellation is raised afterwards."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
