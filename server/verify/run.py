"""Runs all checks on one engine, in order, and fills the report."""

from __future__ import annotations

from collections.abc import Sequence

from ...runner.messages import SamplingParams
from ..drafters.acceptance import Submits
from ..progress import CountProgress
from .greedy import check_greedy
from .plan import Plan, Subject
from .replies import generate
from .report import Report
from .rounding import check_logprobs, measure_rounding
from .sampled import check_sampled, sampled_options


async def run_checks(engine: Submits, subject: Subject, plan: Plan, report: Report) -> None:
    """Add all verdicts to the report. Raises what the engine raises if it dies."""
    prompts = list(subject.prompts[: plan.num_prompts])
    rounding = await measure_rounding(engine, prompts, plan.sample_tokens, subject.dtype, report)
    await check_logprobs(engine, prompts, plan.sample_tokens, rounding, report)
    with CountProgress("greedy text", 4 * len(prompts), "replies") as bar:
        await check_greedy(
            engine, prompts, plan.max_tokens, subject.stop_token_ids, rounding, report, bar.update
        )
    likely = await _likely(engine, min(subject.prompts, key=len))
    options = sampled_options(likely, subject.grammar, plan.sample_tokens)
    options = [o for o in options if not plan.options or o.name in plan.options]
    if not plan.num_samples or not options:
        return
    total = 2 * plan.num_samples * len(options)
    with CountProgress("sampled text", total, "replies") as bar:
        await check_sampled(
            engine, subject, options, plan.num_samples, rounding, report, bar.update
        )  # fmt: skip


async def _likely(engine: Submits, prompt: Sequence[int]) -> list[int]:
    """The likeliest first tokens of a reply."""
    sampling = SamplingParams(0, 1, temperature=0.0, logprobs=8)
    reply = (await generate(engine, [prompt], sampling, drafts=False))[0]
    return reply.logprobs[0].top_ids if reply.logprobs else []
