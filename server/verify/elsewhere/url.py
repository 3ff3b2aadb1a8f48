"""Checks servers that run elsewhere, by what any OpenAI-compatible server reports.

Two URLs are compared as a server with drafts and one without. One URL is compared with itself:
alone and under load, and its samples with its own log probabilities.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from ....configs.options import ConfigError
from ...progress import CountProgress
from ..endpoint import TOP, Endpoint, RequestFailed, connect
from ..greedy import first_difference
from ..plan import Plan
from ..report import FALSE_ALARM, Report, nats
from ..statistics import Bet, compare
from ..text import check_text

SERVER, GREEDY, SAMPLED = "Server", "Greedy text", "Sampled text"
_NEAR_TIE = 0.25  # nats; what 16 bits may do, since a stranger's rounding cannot be measured
_ROUNDING = 0.02  # nats of the mean log probability, for the same reason
_POSITIONS = 3
_LIKELY = 3  # tokens; all others are unlikely
_AT_ONCE = 64  # sampled replies
_END = re.compile(r"|<.*>|\[.*\]", re.DOTALL)  # texts of tokens that may end a reply
# A sentence that has begun goes on, so that replies are long enough to be compared.
_BEGINNING = "\n\nFirst of all,"
_EVENTS = ("the likeliest token", "an unlikely token")


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
        sides = [await connect(client, model) for client in clients]
        if any(side.is_chat for side in sides):
            sides = [replace(side, is_chat=True) for side in sides]
        names = dict(zip(("url", "other_url"), urls, strict=False))
        report = Report({"model": sides[0].model, **names})
        _note_limits(sides, report)
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


def _note_limits(sides: Sequence[Endpoint], report: Report) -> None:
    """Say what the servers cannot be asked for."""
    for side in sides:
        url = side.client.base_url
        if side.is_chat:
            report.note(SERVER, "endpoint", f"{url} has no completions, so chats are compared")
        if not side.extra:
            report.note(
                SERVER, "options", f"{url} refuses options beyond OpenAI's, so its defaults of "
                "top_k, min_p and penalties may change what is sampled",
            )  # fmt: skip
        if not side.has_logprobs:
            report.note(
                SERVER, "log probabilities", f"{url} reports none, so that near-ties cannot be "
                "told from faults, and words are compared in place of tokens",
            )  # fmt: skip


async def _check(
    on: Endpoint, off: Endpoint, prompts: Sequence[str], plan: Plan, report: Report
) -> None:
    if not (on.is_chat or off.is_chat):
        prompts = [prompt + _BEGINNING for prompt in prompts]
    chosen = list(prompts[: plan.num_prompts])
    with CountProgress("greedy text", 3 * len(chosen), "replies") as bar:
        await check_greedy(on, off, chosen, plan.max_tokens, report, bar.update)
    if plan.num_samples:
        num_sides = 1 if on is off else 2
        with CountProgress("sampled text", num_sides * plan.num_samples, "replies") as bar:
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
        reply = await side.complete(prompt, max_tokens=max_tokens, temperature=0, logprobs=TOP)
        tick()
        return Tokens.of(reply["choices"][0])

    reference = [await ask(off, prompt) for prompt in prompts]
    alone = [await ask(on, prompt) for prompt in prompts]
    loaded = await asyncio.gather(*(ask(on, prompt) for prompt in prompts))
    for name, ours in (("one request at a time", alone), ("all requests at once", loaded)):
        known = [
            await ask_again(off, prompt, a, b)
            for prompt, a, b in zip(prompts, ours, reference, strict=True)
        ]
        judge_greedy(name, ours, known, report)


def judge_greedy(
    name: str, ours: Sequence[Tokens], reference: Sequence[Tokens], report: Report
) -> None:
    """Add the verdict: identical, different first in a near-tie, or different."""
    ties: list[float] = []
    wrong: list[str] = []
    unknown = 0
    for number, (a, b) in enumerate(zip(ours, reference, strict=True), 1):
        at = first_difference(a.texts, b.texts)
        if at is None:
            continue
        nats_apart = gap(a, b, at)
        if nats_apart is None:
            unknown += 1
        elif nats_apart <= _NEAR_TIE:
            ties.append(nats_apart)
        else:
            words = "not among the likeliest"
            if nats_apart < math.inf:
                words = f"{nats(nats_apart)} below the other"
            wrong.append(f"prompt {number}, token {at + 1} is {words}")
    equal = len(ours) - len(ties) - len(wrong) - unknown
    text = f"{equal} of {len(ours)} replies are identical"
    if ties:
        text += f", {len(ties)} differ first in a near-tie of at most {nats(max(ties))}"
    if wrong:
        text += f", {len(wrong)} differ: {wrong[0]} (rounding explains {nats(_NEAR_TIE)})"
    figures = {"identical": equal, "near_ties": ties, "different": wrong, "unknown": unknown}
    if unknown:
        text += f", {unknown} differ where no log probability tells whether in a near-tie"
    if unknown and not wrong:
        report.note(GREEDY, name, text, **figures)
    else:
        report.add(GREEDY, name, not wrong, text, **figures)


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

    async def ask(side: Endpoint) -> Tokens:
        reply = await side.complete(
            prompt, max_tokens=plan.sample_tokens, temperature=1, top_p=1, logprobs=TOP
        )
        tick()
        return Tokens.of(reply["choices"][0])

    sides = [on] if on is off else [on, off]
    found: list[list[Tokens]] = [[] for _ in sides]
    end = time.monotonic() + 60 * plan.minutes
    while (left := plan.num_samples - len(found[0])) > 0:
        for side, replies in zip(sides, found, strict=True):
            asked = (ask(side) for _ in range(min(left, _AT_ONCE)))
            replies += await asyncio.gather(*asked)
        if time.monotonic() > end:
            break
    report.setup["sampled_replies"] = len(found[0])
    ours, theirs = found[0], found[-1]
    if on.has_logprobs:
        judge_bets(ours, level, report)
    else:
        report.skip(SAMPLED, "its own probabilities", "the server reports no log probabilities")
    if on is off:
        return
    unit = "token" if on.has_logprobs and off.has_logprobs else "word"
    if unit == "word":
        ours, theirs = ([reply.words for reply in side] for side in found)
    for place in range(_POSITIONS):
        counts: list[Counter[Hashable]] = [
            Counter(reply.texts[place] if place < len(reply.texts) else None for reply in side)
            for side in (ours, theirs)
        ]
        two = compare(counts[0], counts[1], level, _ROUNDING)
        text = f"total variation {two.total_variation:.3f}, chance gives up to {two.bound:.3f}"
        if two.fails:
            text += f"; {two.worst!r}: {two.counts[0]} and {two.counts[1]}, p = {two.p_value:.1g}"
        report.add(SAMPLED, f"{unit} {place + 1}", not two.fails, text, **vars(two))


def judge_bets(replies: Sequence[Tokens], level: float, report: Report) -> None:
    """Test sampled replies against the probabilities that the server itself reports.

    One test counts how often the likeliest token was emitted, the other how often a token outside
    the likeliest ones was. Adds both results to `report`; each may fail by chance with the
    probability `level`.
    """
    bets = {name: Bet() for name in _EVENTS}
    some_end = any(reply.ends for reply in replies)
    most = None
    if not all(reply.is_complete for reply in replies):
        # A server may report none for accepted drafts: then whether a position counts would depend
        # on the token that was emitted. The first token is no draft.
        most = 1
        report.note(
            SAMPLED, "log probabilities",
            "those of some tokens are missing, so only the first token of each reply is compared "
            "with its probability",
        )  # fmt: skip
    for reply in replies:
        for text, top in zip(reply.texts[:most], reply.top[:most], strict=True):
            # A server may add the emitted token to the list; the likeliest ones stay the first.
            likely = sorted(top.items(), key=lambda item: -item[1])[:TOP]
            words = [(name, math.exp(value)) for name, value in likely if not _END.fullmatch(name)]
            if len(words) < _LIKELY or any("\ufffd" in name for name, _ in words):
                continue  # texts that several tokens share do not tell which one was emitted
            if _END.fullmatch(text):
                continue
            # Not every server reports the token that ends a reply, so all is on the condition that
            # the reply goes on. An end that is not listed is less likely than what is.
            rest = 1 - math.fsum(math.exp(value) for name, value in likely if _END.fullmatch(name))
            is_listed = len(words) < len(likely) or not some_end
            rounding = _ROUNDING if is_listed else _ROUNDING + math.exp(likely[-1][1])
            first, p = words[0][0], min(1.0, words[0][1] / max(rest, words[0][1]))
            bets[_EVENTS[0]].add(text == first, p, rounding)
            mass = math.fsum(p for _, p in words[:_LIKELY]) / rest
            if mass < 1 - 1e-3:
                tolerance = math.log1p(mass * rounding / (1 - mass))
                names = {name for name, _ in words[:_LIKELY]}
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


_WORDS = re.compile(r"\s*\S+|\s+$")
_LEAST_ROW = 2  # log probabilities that tell a gap


@dataclass(frozen=True)
class Tokens:
    """A reply, token by token; a server without log probabilities tells only its words."""

    texts: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]  # the likeliest tokens at each position; empty: not reported
    ends: bool = False  # whether the model ended the reply

    @classmethod
    def of(cls, choice: dict[str, Any]) -> Tokens:
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
            list(found.get(key) or ()) for key in ("tokens", "token_logprobs", "top_logprobs")
        )
        if not texts or len(texts) != len(logprobs):
            texts = _WORDS.findall(str(choice.get("text") or ""))
            logprobs, top = [math.nan] * len(texts), []
        top += [None] * (len(texts) - len(top))
        ends = choice.get("finish_reason") == "stop"
        return cls(texts, logprobs, [dict(row or {}) for row in top], ends)

    @property
    def words(self) -> Tokens:
        """The same reply, as a server without log probabilities tells it."""
        return Tokens.of({"text": "".join(self.texts)})

    @property
    def is_complete(self) -> bool:
        """Whether the likeliest tokens are known at every position."""
        return all(len(row) >= _LEAST_ROW for row in self.top)


def gap(ours: Tokens, theirs: Tokens, at: int) -> float | None:
    """By how many nats the token of `ours` is less likely than that of `theirs` at position `at`.

    The likeliest tokens are those of `theirs`; infinity if the token is not among them, and None
    if they are unknown. Where one of the replies ends, the token that ends it has no text: then the
    gap is at least that of the two likeliest tokens."""
    row = theirs.top[at] if at < len(theirs.top) else {}
    if len(row) < _LEAST_ROW:
        return None
    first, second, *_ = sorted(row.values(), reverse=True)
    if at >= len(ours.texts) or at >= len(theirs.texts):
        return first - second
    chosen = row.get(ours.texts[at])
    return math.inf if chosen is None else max(0.0, row.get(theirs.texts[at], first) - chosen)


async def ask_again(side: Endpoint, prompt: str, ours: Tokens, theirs: Tokens) -> Tokens:
    """`theirs` with the likeliest tokens at the first difference, if they were not reported.

    llama.cpp reports none for accepted drafts, and no server does for the token that ends a reply.
    The first token of a request is no draft, so the text up to there is continued by one token.
    """
    at = first_difference(ours.texts, theirs.texts)
    if at is None or gap(ours, theirs, at) is not None or side.is_chat or not side.has_logprobs:
        return theirs
    text = prompt + "".join(theirs.texts[:at])
    try:
        reply = await side.complete(text, max_tokens=1, temperature=0, logprobs=TOP)
    except RequestFailed:
        return theirs
    row = next(iter(Tokens.of(reply["choices"][0]).top), {})
    return replace(theirs, top=[*theirs.top[:at], row, *theirs.top[at + 1 :]])
