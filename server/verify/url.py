"""Checks servers that run elsewhere, by what any OpenAI-compatible server reports.

Two URLs are compared as a server with drafts and one without. One URL is compared with itself:
alone and under load, and its samples with its own log probabilities.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ...configs.options import ConfigError
from ..progress import CountProgress
from .greedy import first_difference
from .plan import Plan
from .report import FALSE_ALARM, Report, nats
from .statistics import Bet, compare
from .text import Endpoint, RequestFailed, check_text

GREEDY, SAMPLED = "Greedy text", "Sampled text"
_NEAR_TIE = 0.25  # nats; what 16 bits may do, since a stranger's rounding cannot be measured
_ROUNDING = 0.02  # nats of the mean log probability, for the same reason
_POSITIONS = 3
_LIKELY = 3  # tokens; all others are unlikely
_TOP = 5  # log probabilities asked for; OpenAI allows 5
_EVENTS = ("the likeliest token", "an unlikely token")


@dataclass(frozen=True)
class Tokens:
    """A reply as its `logprobs` describe it, as legacy completions report them."""

    texts: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]  # the likeliest tokens at each position

    @classmethod
    def of(cls, choice: dict[str, Any]) -> Tokens:
        """Raises RequestFailed if the server reports none."""
        found = choice.get("logprobs") or {}
        if rows := found.get("content"):  # as chats report them, also for completions of llama.cpp
            found = {
                "tokens": [row["token"] for row in rows],
                "token_logprobs": [row["logprob"] for row in rows],
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in row.get("top_logprobs") or ()}
                    for row in rows
                ],
            }
        texts, logprobs, top = (
            found.get(key) or [] for key in ("tokens", "token_logprobs", "top_logprobs")
        )
        if not texts or len(texts) != len(logprobs) or len(texts) != len(top):
            raise RequestFailed('completions have no log probabilities for "logprobs": 5')
        return cls(list(texts), list(logprobs), [dict(row or {}) for row in top])


async def verify_urls(
    urls: Sequence[str], model: str | None, key: str | None, prompts: Sequence[str], plan: Plan
) -> Report:
    """Check one or two servers; the second is the one without drafts. Raises ConfigError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    no_limit = httpx.Limits(max_connections=None)
    clients = [
        httpx.AsyncClient(base_url=base(url), headers=headers, timeout=600, limits=no_limit)
        for url in urls
    ]
    try:
        sides = [Endpoint(client, model or await _only_model(client)) for client in clients]
        names = dict(zip(("url", "other_url"), urls, strict=False))
        report = Report({"model": sides[0].model, **names})
        await _check(sides[0], sides[-1], prompts, plan, report)
        return report
    except (RequestFailed, httpx.HTTPError) as error:
        raise ConfigError(f"--url: {str(error) or type(error).__name__}") from None
    finally:
        for client in clients:
            await client.aclose()


def base(url: str) -> str:
    """The server's root; a trailing /v1 may be given. Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


async def _only_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists."""
    reply = await client.get("/v1/models")
    models = reply.json().get("data") if reply.status_code == 200 else None
    if not models:
        raise RequestFailed(f"{client.base_url} lists no model; name it")
    return str(models[0]["id"])


async def _check(
    on: Endpoint, off: Endpoint, prompts: Sequence[str], plan: Plan, report: Report
) -> None:
    chosen = list(prompts[: plan.num_prompts])
    with CountProgress("greedy text", 3 * len(chosen), "replies") as bar:
        await check_greedy(on, off, chosen, plan.max_tokens, report, bar.update)
    if plan.num_samples:
        sides = 1 if on is off else 2
        with CountProgress("sampled text", sides * plan.num_samples, "replies") as bar:
            await check_samples(on, off, min(prompts, key=len), plan, report, bar.update)
    with CountProgress("text", len(chosen), "prompts") as bar:
        await check_text(on, off, chosen, plan.max_tokens, report, bar.update)


async def check_greedy(
    on: Endpoint,
    off: Endpoint,
    prompts: Sequence[str],
    max_tokens: int,
    report: Report,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Greedy replies of `off`, one at a time, against those of `on`, alone and all at once."""

    async def ask(side: Endpoint, prompt: str) -> Tokens:
        reply = await side.complete(prompt, max_tokens=max_tokens, temperature=0, logprobs=_TOP)
        tick()
        return Tokens.of(reply["choices"][0])

    reference = [await ask(off, prompt) for prompt in prompts]
    alone = [await ask(on, prompt) for prompt in prompts]
    judge_greedy("one request at a time", alone, reference, report)
    loaded = await asyncio.gather(*(ask(on, prompt) for prompt in prompts))
    judge_greedy("all requests at once", loaded, reference, report)


def judge_greedy(
    name: str, ours: Sequence[Tokens], reference: Sequence[Tokens], report: Report
) -> None:
    """Add the verdict: identical, different first in a near-tie, or different."""
    ties: list[float] = []
    wrong: list[str] = []
    for number, (a, b) in enumerate(zip(ours, reference, strict=True), 1):
        at = first_difference(a.texts, b.texts)
        if at is None:
            continue
        top = b.top[at] if at < len(b.top) else {}
        chosen = top.get(a.texts[at]) if at < len(a.texts) else None
        gap = math.inf if chosen is None else b.logprobs[at] - chosen
        if gap <= _NEAR_TIE:
            ties.append(gap)
        else:
            words = "not among the likeliest" if gap == math.inf else f"{nats(gap)} below the other"
            wrong.append(f"prompt {number}, token {at + 1} is {words}")
    equal = len(ours) - len(ties) - len(wrong)
    text = f"{equal} of {len(ours)} replies are identical"
    if ties:
        text += f", {len(ties)} differ first in a near-tie of at most {nats(max(ties))}"
    if wrong:
        text += f", {len(wrong)} differ: {wrong[0]} (rounding explains {nats(_NEAR_TIE)})"
    report.add(GREEDY, name, not wrong, text, identical=equal, near_ties=ties, different=wrong)


async def check_samples(
    on: Endpoint,
    off: Endpoint,
    prompt: str,
    plan: Plan,
    report: Report,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Samples of `on` against its own log probabilities, and against samples of `off`."""
    level = FALSE_ALARM / (len(_EVENTS) + _POSITIONS)
    gate = asyncio.Semaphore(64)

    async def ask(side: Endpoint) -> Tokens:
        async with gate:
            reply = await side.complete(
                prompt, max_tokens=plan.sample_tokens, temperature=1, top_p=1, logprobs=_TOP
            )
        tick()
        return Tokens.of(reply["choices"][0])

    ours = await asyncio.gather(*(ask(on) for _ in range(plan.num_samples)))
    judge_bets(ours, level, report)
    if on is off:
        return
    theirs = await asyncio.gather(*(ask(off) for _ in range(plan.num_samples)))
    for place in range(_POSITIONS):
        counts: list[Counter[Hashable]] = [
            Counter(reply.texts[place] if place < len(reply.texts) else None for reply in side)
            for side in (ours, theirs)
        ]
        two = compare(counts[0], counts[1], level, _ROUNDING)
        text = f"total variation {two.total_variation:.3f}, chance gives up to {two.bound:.3f}"
        if two.fails:
            text += f"; {two.worst!r}: {two.counts[0]} and {two.counts[1]}, p = {two.p_value:.1g}"
        report.add(SAMPLED, f"token {place + 1}", not two.fails, text, **vars(two))


def judge_bets(replies: Sequence[Tokens], level: float, report: Report) -> None:
    """Bet on how often the likeliest token and an unlikely one were emitted."""
    bets = {name: Bet() for name in _EVENTS}
    for reply in replies:
        for text, top in zip(reply.texts, reply.top, strict=True):
            # A server may add the emitted token to the list; the likeliest ones stay the first.
            likely = sorted(top.items(), key=lambda item: -item[1])[:_TOP]
            if len(likely) < _LIKELY or any(not name or "\ufffd" in name for name, _ in likely):
                continue  # texts that several tokens share do not tell which one was emitted
            first, p = likely[0][0], min(1.0, math.exp(likely[0][1]))
            bets[_EVENTS[0]].add(text == first, p, _ROUNDING)
            names = {name for name, _ in likely[:_LIKELY]}
            mass = math.fsum(math.exp(value) for _, value in likely[:_LIKELY])
            if mass < 1 - 1e-3:
                tolerance = math.log1p(mass * _ROUNDING / (1 - mass))
                bets[_EVENTS[1]].add(text not in names, 1 - mass, tolerance)
    for name, bet in bets.items():
        if not bet.num_trials:
            report.skip(SAMPLED, name, "the log probabilities do not tell")
            continue
        text = (
            f"{bet.hits} times, {bet.expected:.1f} expected in {bet.num_trials}; a bias of "
            f"{100 * bet.detectable(level):.2g} % would show beyond rounding"
        )
        report.add(SAMPLED, name, not bet.fails(level), text, trials=bet.num_trials,
                   bias=bet.excess(), detectable_bias=bet.detectable(level))  # fmt: skip
