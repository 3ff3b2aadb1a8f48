"""Measures a drafter's acceptance in a real engine, by draft position and domain of the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...runner.messages import AddRequest, RequestOutput, SamplingParams
from ..request_stream import RequestStream


class Submits(Protocol):
    """The part of an engine client that measuring uses."""

    def submit(self, request: AddRequest) -> RequestStream: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class MeasuredPrompt:
    token_ids: tuple[int, ...]
    domain: str = ""


@dataclass
class Tally:
    """Counts drafts and accepted drafts over a set of replies."""

    num_verify_steps: int = 0  # steps with at least one draft
    num_tokens: int = 0  # tokens of the replies
    drafted: list[int] = field(default_factory=list)  # [K] verify steps with a draft k
    accepted: list[int] = field(default_factory=list)  # [K] those of them that accepted draft k

    def add(self, output: RequestOutput) -> None:
        self.num_tokens += len(output.token_ids)
        count = output.num_draft_tokens
        if not count:
            return
        self.num_verify_steps += 1
        for counts in (self.drafted, self.accepted):
            counts.extend([0] * (count - len(counts)))
        for position in range(count):
            self.drafted[position] += 1
            self.accepted[position] += position < output.num_accepted_tokens

    def merge(self, other: Tally) -> None:
        self.num_verify_steps += other.num_verify_steps
        self.num_tokens += other.num_tokens
        for ours, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            ours.extend([0] * (len(theirs) - len(ours)))
            for position, count in enumerate(theirs):
                ours[position] += count

    @property
    def acceptance(self) -> list[float]:
        """[K] The share of drafts k that were accepted; after a rejected draft none is accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_length(self) -> float:
        """Tokens per verify step, including the target's own; 1.0 if there were no drafts."""
        if not self.num_verify_steps:
            return 1.0
        return 1 + sum(self.accepted) / self.num_verify_steps

    def as_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(self.mean_length, 4),
            "acceptance": [round(share, 4) for share in self.acceptance],
            "verify_steps": self.num_verify_steps,
            "tokens": self.num_tokens,
        }


class MeasurementFailed(Exception):
    """A measurement could not be completed; the message is one sentence that gives the reason."""


async def measure_acceptance(
    engine: Submits,
    prompts: Sequence[MeasuredPrompt],
    temperature: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    concurrency: int = 8,
    on_reply: Callable[[], object] = lambda: None,
    on_output: Callable[[int, RequestOutput], object] = lambda prompt, output: None,
    name: str = "acceptance",
) -> dict[str, Tally]:
    """Let the engine reply to `prompts` and count drafts; returns a tally per domain.

    Prompt i is sampled with seed i; at most `concurrency` replies run at once. Calls `on_reply`
    after each reply and `on_output` with a prompt's index and each output. Raises MeasurementFailed
    if a reply fails, and what the engine raises if it dies. Then, and on cancellation, all other
    replies are aborted.
    """
    tallies: dict[str, Tally] = {}
    gate = asyncio.Semaphore(concurrency)

    async def reply(index: int, prompt: MeasuredPrompt) -> None:
        tally = tallies.setdefault(prompt.domain, Tally())
        request = AddRequest(
            f"{name}-{temperature:g}-{index}",
            list(prompt.token_ids),
            SamplingParams(
                seed=index,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
            ),
        )
        async with gate:
            stream = engine.submit(request)
            try:
                async for output in stream:
                    if output.error is not None:
                        raise MeasurementFailed(f"prompt {index + 1} failed: {output.error}")
                    tally.add(output)
                    on_output(index, output)
            finally:
                engine.abort(request.request_id)  # has no effect if the request has ended
        on_reply()

    tasks = [asyncio.create_task(reply(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tallies


def total(tallies: dict[str, Tally]) -> Tally:
    out = Tally()
    for tally in tallies.values():
        out.merge(tally)
    return out


def table(tallies: dict[str, Tally], num_drafts: int) -> str:
    """The tallies as a text table: a row per domain, and one for all domains.

    Columns: tokens per verify step, the acceptance of each draft, verify steps, tokens."""
    width = max(len(name) for name in (*tallies, "all domains"))
    positions = "".join(f"{f'draft {k}':>10}" for k in range(num_drafts))
    lines = [f"{'domain':{width}}  {'tok/step':>8}{positions}{'steps':>9}{'tokens':>9}"]
    rows = [*sorted(tallies.items()), ("all domains", total(tallies))]
    for name, tally in rows:
        shares = [*tally.acceptance, *[0.0] * num_drafts][:num_drafts]
        cells = "".join(f"{share:>10.1%}" for share in shares)
        counts = f"{tally.num_verify_steps:>9}{tally.num_tokens:>9}"
        lines.append(f"{name or 'unnamed':{width}}  {tally.mean_length:>8.2f}{cells}{counts}")
    return "\n".join(lines)
