"""`slipstream verify`: check on the user's own model that speculation is lossless."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...configs.hosts import check_one_host
from ...configs.load import add_flags, load_config
from ...configs.options import ConfigError

if TYPE_CHECKING:
    from ..verify.plan import Plan
    from ..verify.report import Report

SUMMARY = "check on your own model that speculation changes nothing but the speed"
_LEAST = {"num_prompts": 1, "max_tokens": 1, "samples": 0, "sample_tokens": 4}
_VALUES: dict[str, tuple[int | float | str, str]] = {
    "--num-prompts": (16, "prompts of the greedy checks"),
    "--max-tokens": (64, "longest greedy reply, in tokens"),
    "--samples": (512, "sampled replies of either side for each set of options; 0 = none"),
    "--sample-tokens": (16, "longest sampled reply, in tokens"),
    "--minutes": (
        5.0, "time for sampled replies, after which fewer than --samples are compared"
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.output import add_output, add_values

    group = parser.add_argument_group("verify", "What is checked.")
    group.add_argument(
        "--data",
        metavar="FILE",
        default="builtin",
        help="JSONL file of prompts, or builtin for chats of eight domains (default)",
    )
    group.add_argument(
        "--url",
        metavar="URL",
        action="append",
        help="check a running OpenAI-compatible server instead of starting one; a second --url "
        "names a server without drafts to compare it with. MODEL is then the name in requests, and "
        "--api-key or OPENAI_API_KEY the key",
    )
    add_values(group, _VALUES)
    add_output(group)
    group.add_argument("--html", metavar="FILE", help="write the report as one page of HTML")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything and print the report; returns 0 if all checks pass, otherwise 1."""
    from ..bench.output import check_file, check_least, tables_to_stderr, write_figures
    from ..verify.plan import Plan

    check_file("--output", args.output)
    check_file("--html", args.html)
    plan = Plan(
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        num_samples=args.samples,
        sample_tokens=args.sample_tokens,
        minutes=args.minutes,
    )
    check_least(args, _LEAST)
    if not args.minutes > 0:
        raise ConfigError(f"--minutes must be above 0, not {args.minutes:g}")
    with tables_to_stderr(args.output):
        report = asyncio.run(_of_urls(args, plan) if args.url else _of_engine(args, plan))
        if report is None:
            return 1
        print(report.table(), flush=True)
    write_figures(args.output, report.as_dict())
    if args.html is not None:
        _write_page(args.html, report)
    return 0 if report.passes else 1


async def _of_engine(args: argparse.Namespace, plan: Plan) -> Report | None:
    config = check_one_host(load_config(args, os.environ))
    from ..verify.session import verify

    return await verify(config, plan, args.data)


async def _of_urls(args: argparse.Namespace, plan: Plan) -> Report:
    from ..drafters.training_prompts import PromptError
    from ..verify.elsewhere.url import verify_urls
    from ..verify.session import read, user_text

    if len(args.url) > 2:
        raise ConfigError(f"--url can be given at most twice, not {len(args.url)} times")
    try:
        prompts = [text for prompt in read(args.data) if (text := user_text(prompt))]
    except (PromptError, OSError) as error:
        raise ConfigError(str(error).rstrip(".")) from None
    if not prompts:
        raise ConfigError(f"--data {args.data}: --url needs prompts with text")
    given = vars(args)
    keys = given.get("api_key") or [os.environ.get("OPENAI_API_KEY")]
    return await verify_urls(args.url, given.get("model_argument"), keys[0], prompts, plan)


def _write_page(path: str, report: Report) -> None:
    from ..verify.report import page

    try:
        Path(path).write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write --html {path}: {(error.strerror or str(error)).lower()}"
        ) from None
