"""Starts the engine and the application that `serve` would start, and checks them.

The engine is asked by messages, as the server asks it, and the application by HTTP requests that
need no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from ...configs.model.model_config import NotServed, text_config
from ...configs.options import ConfigError
from ...configs.schema import Config
from ...runner.messages import GrammarSpec, Ready, SamplingParams
from ..drafters.acceptance import Tally
from ..drafters.training_prompts import (
    Prompt,
    PromptError,
    heldout_prompts,
    read_prompts,
    tokenize_prompts,
)
from ..engine.engine_client import EngineClient, EngineDead, WorkerFailed
from ..generation.services import Services
from ..progress import CountProgress, StartupProgress
from ..startup.app import create_app
from ..startup.model_files import ModelFilesError, check_model_files
from ..text.tokenizer import Tokenizer, TokenizerLoadError
from ..version import version
from .diagnosis.causes import read_head
from .diagnosis.experiments import Patient, accepted, diagnose, try_boundaries
from .drafts import judge_proposals, tally
from .endpoint import Endpoint
from .plan import Plan, Subject, drafts_are_one_hot
from .replies import Reply, generate
from .report import Report
from .run import run_checks
from .text import check_text

_LETTERS = b"abcdefghijklmnopqrstuvwxyz "
_GRAMMAR = GrammarSpec("regex", "[a-z ]+")


def with_drafts(config: Config) -> Config:
    """The configuration with drafts in every step: K is the largest, and the watchdog is off.

    What is emitted must not depend on K, and a drafter that is turned off cannot be checked. Raises
    ConfigError if there is nothing to check.
    """
    speculative = config.speculative
    if speculative.method == "off":
        raise ConfigError("verify needs a drafter; name one with --speculative-config")
    if speculative.synthetic_acceptance_rates is not None:
        raise ConfigError("synthetic_acceptance_rates are not lossless, so verify refuses them")
    fixed = replace(speculative, num_speculative_tokens=speculative.max_drafts, watchdog=False)
    return replace(config, speculative=fixed)


async def verify(config: Config, plan: Plan, data: str) -> Report | None:
    """Start an engine and check it; None after printing why it could not be checked.

    `data` is a file of prompts or "builtin". Raises ConfigError.
    """
    config = with_drafts(config)
    client = EngineClient(config)
    try:
        check_model_files(config)
        app = create_app(config, client)
        services: Services = app.state.services
        prompts = read(data)
        token_ids = tokenize_prompts(prompts, services.tokenizer, services.template)
        with_text = [user_text(prompt) for prompt in prompts]
    except (ModelFilesError, PromptError, TokenizerLoadError, ValueError, OSError) as error:
        raise ConfigError(str(error).rstrip(".")) from None
    plain = [services.tokenizer.encode(text) for text in with_text if text]
    try:
        async with _started(client, services) as ready:
            report = Report(_setup(config, ready))
            subject = _subject(config, services.tokenizer, ready, token_ids, plain)
            replies = await run_checks(client, subject, plan, report)
            await _check_text(app, subject, plan, report)
            patient = _patient(config, ready)
            is_low = await diagnose(client, subject, patient, replies, report)
        if is_low:
            await _try_boundaries(config, services, patient, replies, report)
        if ready.device.startswith("cuda") and not config.graph.enforce_eager:
            await _check_graphs(config, services, subject, plan, replies, report)
        return report
    except (WorkerFailed, EngineDead) as error:
        print(f"slipstream verify: error: {error}", file=sys.stderr)
        return None


@asynccontextmanager
async def _started(client: EngineClient, services: Services) -> AsyncIterator[Ready]:
    """The engine of a client, until the end of the context. Raises WorkerFailed."""
    try:
        with StartupProgress() as progress:
            ready = await client.start(progress)
        client.set_vocabulary(services.vocabulary())
        yield ready
    finally:
        await client.shutdown()


async def _try_boundaries(
    config: Config, services: Services, patient: Patient, replies: Sequence[Reply],
    report: Report,
) -> None:  # fmt: skip
    """Start an engine for each choice of auxiliary layers that may be meant."""

    async def measure(boundaries: tuple[int, ...]) -> Tally:
        speculative = replace(config.speculative, aux_hidden_state_boundaries=boundaries)
        other = replace(config, speculative=speculative)
        client = EngineClient(other)
        async with _started(client, services):
            return await accepted(client, [reply.prompt for reply in replies])

    await try_boundaries(patient, tally(replies), measure, report)


async def _check_graphs(
    config: Config, services: Services, subject: Subject, plan: Plan,
    replies: Sequence[Reply], report: Report,
) -> None:  # fmt: skip
    """Compare the drafts that CUDA graphs made with those of an eager engine."""
    eager = replace(config, graph=replace(config.graph, enforce_eager=True))
    client = EngineClient(eager)
    sampling = SamplingParams(0, plan.max_tokens, temperature=0.0)
    async with _started(client, services):
        others = await generate(
            client, [reply.prompt for reply in replies], sampling, drafts=True, concurrency=1
        )
    ours, theirs = (
        {k: v for r in side for k, v in r.texts_and_drafts.items()} for side in (replies, others)
    )
    judge_proposals(
        "graphs against eager", ours, theirs, subject.dtype, report,
        "a captured graph reads or writes memory that the eager passes do not",
    )  # fmt: skip


def _patient(config: Config, ready: Ready) -> Patient:
    """What a diagnosis can know of the drafter and its target."""
    speculative = config.speculative
    is_head = speculative.model is not None and speculative.method.startswith("eagle")
    head = read_head(Path(speculative.model or "")) if is_head else None
    target: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, NotServed):
        raw = (Path(config.model.model) / "config.json").read_text(encoding="utf-8")
        target = text_config(json.loads(raw))
    return Patient(
        method=ready.speculative_method,
        head=head,
        target=target,
        boundaries=tuple(speculative.aux_hidden_state_boundaries or ()),
        weight_formats=ready.weight_formats,
        max_model_len=ready.max_model_len,
    )


async def _check_text(app: FastAPI, subject: Subject, plan: Plan, report: Report) -> None:
    """The checks of text, by requests to the application."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://verify", timeout=None
    ) as web:
        model = app.state.services.model_names[0]
        keys = app.state.services.config.server.api_key
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        web.headers.update(headers)
        on, off = Endpoint(web, model), Endpoint(web, model, {"speculative": {"enabled": False}})
        prompts = list(subject.prompts[: plan.num_prompts])
        with CountProgress("text", len(prompts), "prompts") as bar:
            await check_text(on, off, prompts, plan.max_tokens, report, bar.update)


def read(data: str) -> list[Prompt]:
    """The prompts of the file `data`, or the built-in ones of each domain in turn."""
    return _in_turn(heldout_prompts()) if data == "builtin" else read_prompts(Path(data))


def user_text(prompt: Prompt) -> str:
    """The text of a prompt without a chat template: what the user wrote last, or all of it."""
    if prompt.messages:
        content = prompt.messages[-1].get("content")
        return content if isinstance(content, str) else ""
    return prompt.text


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, with those of different domains next to each other."""
    seen: dict[str, int] = {}
    keyed = []
    for prompt in prompts:
        seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
        keyed.append((seen[prompt.domain], prompt))
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]


def _subject(
    config: Config,
    tokenizer: Tokenizer,
    ready: Ready,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
) -> Subject:
    stop = sorted({*tokenizer.eos_ids, *ready.eos_token_ids})
    room = ready.max_model_len - 1
    fitting = [ids for ids in prompts if 0 < len(ids) < room // 2]
    if not fitting:
        raise ConfigError(f"no prompt is shorter than half of the {room + 1} tokens of the model")

    def valid(ids: Sequence[int]) -> bool:
        text = b"".join(tokenizer.token_bytes(i) for i in ids if i not in stop)
        return not text.strip(_LETTERS)

    return Subject(
        prompts=fitting,
        stop_token_ids=stop,
        vocab_size=ready.vocab_size,
        dtype=ready.dtype,
        method=ready.speculative_method,
        one_hot=drafts_are_one_hot(config.speculative),
        plain_prompts=[ids for ids in plain if 0 < len(ids) < room // 2],
        grammar=_GRAMMAR if stop else None,  # a grammar needs a token that ends the reply
        batch_invariant=config.graph.batch_invariant,
        valid=valid,
    )


def _setup(config: Config, ready: Ready) -> dict[str, Any]:
    """What was checked, for the report."""
    speculative = config.speculative
    return {
        "version": version(),
        "model": (config.server.served_model_name or (config.model.model,))[0],
        "method": ready.speculative_method,
        "drafter": speculative.model,
        "num_speculative_tokens": ready.num_speculative_tokens,
        "draft_sampling": speculative.draft_sampling,
        "rejection_sampling": speculative.rejection_sampling,
        "batch_invariant": config.graph.batch_invariant,
        "device": ready.device_name or ready.device,
        "dtype": ready.dtype,
        "weight_formats": ready.weight_formats,
        "attention_backend": ready.attention_backend,
        "max_num_seqs": ready.max_num_seqs,
        "cpus": os.cpu_count(),
    }
