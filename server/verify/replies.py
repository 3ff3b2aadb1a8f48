"""Generates the replies that the checks compare, with drafts and without them, in one engine.

Everything is in token ids: the checks of text are in `text`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ...runner.messages import AddRequest, SamplingParams, TokenLogprobs, unpack_logprobs
from ..drafters.acceptance import Submits

_names = itertools.count()


@dataclass
class Proposal:
    """The drafts that one step verified for a request."""

    start: int  # number of reply tokens before them
    drafts: list[int]
    num_emitted: int  # tokens that the step emitted


@dataclass
class Reply:
    prompt: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0  # from submission to the end

    @property
    def texts_and_drafts(self) -> dict[tuple[int, ...], list[int]]:
        """What the drafter proposed after each text: known tokens -> drafts."""
        return {
            (*self.prompt, *self.token_ids[: proposal.start]): proposal.drafts
            for proposal in self.proposals
        }

    def drafts_at(self) -> dict[int, int]:
        """The draft that was judged at each position of the reply; others were never reached."""
        found: dict[int, int] = {}
        for proposal in self.proposals:
            for offset in range(min(proposal.num_emitted, len(proposal.drafts))):
                found[proposal.start + offset] = proposal.drafts[offset]
        return found


async def generate(
    engine: Submits,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    drafts: bool,
    first_seed: int = 0,
    concurrency: int = 0,
    tick: Callable[[], object] = lambda: None,
    salt: str = "",
    own_salts: bool = False,
) -> list[Reply]:
    """The replies to `prompts`, in their order; that to prompt i has the seed `first_seed` + i.

    `concurrency` 0 submits all at once. `salt` keeps them from sharing cached KV with replies of
    another salt, and `own_salts` with each other. Faults of single requests are in `Reply.error`;
    raises what the engine raises if it dies.
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(prompts)))

    async def one(index: int, prompt: Sequence[int]) -> Reply:
        params = msgspec.structs.replace(
            sampling, seed=first_seed + index, speculative_enabled=drafts, report_drafts=drafts
        )
        request = AddRequest(f"verify-{next(_names)}", list(prompt), params, cache_salt=salt)
        if own_salts:
            request.cache_salt = request.request_id
        reply = Reply(prompt)
        async with gate:
            began = time.perf_counter()
            stream = engine.submit(request)
            try:
                async for output in stream:
                    if output.draft_token_ids:
                        made = len(output.token_ids)
                        proposal = Proposal(len(reply.token_ids), output.draft_token_ids, made)
                        reply.proposals.append(proposal)
                    reply.token_ids += output.token_ids
                    reply.logprobs += output.logprobs or []
                    if output.prompt_logprobs:
                        reply.prompt_logprobs = unpack_logprobs(output.prompt_logprobs)
                    reply.finish_reason = output.finish_reason or reply.finish_reason
                    reply.error = output.error or reply.error
            finally:
                engine.abort(request.request_id)  # has no effect if the request has ended
            reply.seconds = time.perf_counter() - began
        tick()
        return reply

    tasks = [asyncio.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Scores = list[TokenLogprobs]  # of each reply token, by a prefill without drafts


async def score(engine: Submits, replies: Sequence[Reply], top: int) -> list[Scores]:
    """The model's log probabilities of each reply's tokens, and of the `top` likeliest ones there.

    They come from a prefill of prompt and reply, so neither drafts nor decode steps have a part in
    them. Equal texts are computed once.
    """
    texts = {(tuple(r.prompt), tuple(r.token_ids)): None for r in replies if r.token_ids}
    sampling = SamplingParams(0, 1, temperature=0.0, prompt_logprobs=top)
    scored = await generate(
        engine, [[*prompt, *ids] for prompt, ids in texts], sampling, drafts=False
    )
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Scores] = {}
    for (prompt, ids), reply in zip(texts, scored, strict=True):
        rows = reply.prompt_logprobs[len(prompt) :]
        found[prompt, ids] = [row for row in rows if row is not None]
    return [found.get((tuple(r.prompt), tuple(r.token_ids)), []) for r in replies]
