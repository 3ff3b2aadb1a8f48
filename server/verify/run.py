"""Runs all checks on one engine, in order, and fills the report."""

from __future__ import annotations

from collections.abc import Sequence

from ...runner.messages import SamplingParams
from ..drafters.acceptance import Submits
from ..progress import CountProgress
from .drafts import (
    check_alignment,
    check_chain,
    check_fresh,
    report_acceptance,
    report_speed,
)
from .greedy import Greedy, check_greedy
from .plan import Plan, Subject
from .replies import Reply, generate
from .report import Report
from .rounding import check_logprobs, measure_rounding
from .sampled import check_sampled, sampled_options


async def run_checks(
    engine: Submits, subject: Subject, plan: Plan, report: Report
) -> Sequence[Reply]:
    """Add all verdicts to the report; returns the greedy replies with drafts, made one by one.

    Raises what the engine raises if it dies.
    """
    prompts = list(subject.prompts[: plan.num_prompts])
    rounding = await measure_rounding(
        engine, prompts, plan.sample_tokens, subject.dtype, report, subject.batch_invariant
    )
    await check_logprobs(engine, prompts, plan.sample_tokens, rounding, report)
    with CountProgress("greedy text", 4 * len(prompts), "replies") as bar:
        greedy = await check_greedy(
            engine, prompts, plan.max_tokens, subject.stop_token_ids, rounding, report, bar.update
        )
    replies = greedy.on
    if plan.checks_drafts:
        await _check_drafts(engine, greedy, subject, report)
    likely = await _likely(engine, min(subject.prompts, key=len))
    options = sampled_options(likely, subject.grammar, plan.sample_tokens)
    options = [o for o in options if not plan.options or o.name in plan.options]
    if plan.num_samples and options:
        total = 2 * plan.num_samples * len(options)
        with CountProgress("sampled text", total, "replies") as bar:
            found = await check_sampled(
                engine, subject, options, plan, rounding, report, bar.update
            )
        report_acceptance(found[0].option.name, found[0].on, report)
    return replies


async def _check_drafts(engine: Submits, greedy: Greedy, subject: Subject, report: Report) -> None:
    check_alignment(greedy.on, report)
    await check_fresh(engine, greedy.on, subject, report)
    if subject.method != "ngram":
        await check_chain(engine, greedy.on, subject.method == "draft_model", report)
    report_acceptance("greedy", greedy.on, report)
    report_speed(greedy.on, greedy.off, report)


async def _likely(engine: Submits, prompt: Sequence[int]) -> list[int]:
    sampling = SamplingParams(0, 1, temperature=0.0, logprobs=8)
    reply = (await generate(engine, [prompt], sampling, drafts=False))[0]
    return reply.logprobs[0].top_ids if reply.logprobs else []
