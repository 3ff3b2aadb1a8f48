"""Starts the engine and the application that `serve` would start, and checks them.

The engine is asked by messages, as the server asks it, and the application by HTTP requests that
need no network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from ...configs.options import ConfigError
from ...configs.schema import Config
from ...runner.messages import GrammarSpec, Ready, SetVocabulary
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
from ..text.tokenizer import Tokenizer, TokenizerLoadError
from ..version import version
from .plan import Plan, Subject, drafts_are_one_hot
from .report import Report
from .run import run_checks
from .text import Endpoint, check_text

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
        app = create_app(config, client)
        services: Services = app.state.services
        prompts = _prompts(services, data)
        with StartupProgress() as progress:
            ready = await client.start(progress)
        tokenizer = services.tokenizer
        client.set_vocabulary(SetVocabulary(tokenizer.vocabulary(), sorted(tokenizer.eos_ids)))
        report = Report(_setup(config, ready))
        subject = _subject(config, tokenizer, ready, prompts)
        await run_checks(client, subject, plan, report)
        await _check_text(app, subject, plan, report)
        return report
    except (PromptError, TokenizerLoadError, ValueError, OSError) as error:
        raise ConfigError(str(error).rstrip(".")) from None
    except (WorkerFailed, EngineDead) as error:
        print(f"slipstream verify: error: {error}", file=sys.stderr)
        return None
    finally:
        await client.shutdown()


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


def _prompts(services: Services, data: str) -> list[list[int]]:
    """The tokenized prompts: of the file `data`, or one of each built-in domain in turn."""
    prompts = _in_turn(heldout_prompts()) if data == "builtin" else read_prompts(Path(data))
    found = tokenize_prompts(prompts, services.tokenizer, services.template)
    return [ids for ids in found if ids]


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, with those of different domains next to each other."""
    seen: dict[str, int] = {}
    keyed = []
    for prompt in prompts:
        seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
        keyed.append((seen[prompt.domain], prompt))
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]


def _subject(
    config: Config, tokenizer: Tokenizer, ready: Ready, prompts: list[list[int]]
) -> Subject:
    stop = sorted({*tokenizer.eos_ids, *ready.eos_token_ids})
    room = ready.max_model_len - 1
    fitting = [ids for ids in prompts if len(ids) < room // 2]
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
        grammar=_GRAMMAR,
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
        "device": ready.device_name or ready.device,
        "dtype": ready.dtype,
        "weight_formats": ready.weight_formats,
        "attention_backend": ready.attention_backend,
        "max_num_seqs": ready.max_num_seqs,
        "cpus": os.cpu_count(),
    }
