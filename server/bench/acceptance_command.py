"""`slipstream bench acceptance`: measure a drafter's acceptance on held-out prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs.load import add_flag, load_config
from ...configs.options import ConfigError, all_options, read_text
from ...configs.schema import Config
from .output import (
    Values,
    add_output,
    add_values,
    check_file,
    check_least,
    tables_to_stderr,
    write_figures,
)

if TYPE_CHECKING:
    from ..drafters.acceptance import MeasuredPrompt
    from ..engine.engine_client import EngineClient

SUMMARY = "measure a drafter's acceptance by position and domain, on held-out prompts"
_TARGET = (
    *("model", "tokenizer", "revision", "dtype", "load_format", "max_model_len", "device"),
    *("gpu_memory_utilization", "max_num_seqs", "chat_template", "enforce_eager", "log_level"),
)
_VALUES: Values = {
    "--method": ("eagle3", "drafting method"),
    "--num-speculative-tokens": (4, "draft length K"),
    "--max-tokens": (128, "longest reply, in tokens"),
    "--concurrency": (8, "replies generated at once"),
    "--temperatures": ("0,1", "temperatures to measure at, separated by commas"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "drafter", metavar="DRAFTER_DIR", help="the drafter's folder or Hugging Face id"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        default="builtin",
        help="JSONL file of prompts, measured on those with the split heldout if there are any; or "
        "builtin for 80 chats of eight domains (default)",
    )
    add_values(parser, _VALUES)
    add_output(parser, "--json")
    group = parser.add_argument_group("target", "The model, as for `slipstream serve`.")
    for name in _TARGET:
        add_flag(group, all_options()[name])


def run(args: argparse.Namespace) -> int:
    given = vars(args)
    check_file("--output", args.output)
    temperatures = _temperatures(args.temperatures)
    check_least(args, {"max_tokens": 1, "concurrency": 1})
    speculative = {
        "method": args.method,
        "model": args.drafter,
        "num_speculative_tokens": args.num_speculative_tokens,
        "watchdog": False,  # it would turn off a poor drafter, which must be measured
    }
    flags = {name: given[name] for name in _TARGET if name in given}
    config = load_config(flags | {"speculative_config": json.dumps(speculative)}, os.environ)
    with tables_to_stderr(args.output):
        figures = asyncio.run(_measure(config, args, temperatures))
    if figures is None:
        return 1
    write_figures(args.output, figures)
    return 0


def _temperatures(text: str) -> tuple[float, ...]:
    from ...configs.options import section_options
    from ...configs.training import ReplyConfig

    option = next(o for o in section_options("", ReplyConfig) if o.name == "temperatures")
    found: tuple[float, ...] = read_text(option, "--temperatures", text)
    if not found or any(not 0 <= t <= 2 for t in found):
        raise ConfigError("--temperatures must be numbers from 0 to 2")
    return found


async def _measure(
    config: Config, args: argparse.Namespace, temperatures: tuple[float, ...]
) -> dict[str, Any] | None:
    """Measure at each temperature; returns the figures, or None after printing an error."""
    from ..drafters.acceptance import MeasurementFailed
    from ..drafters.training_prompts import PromptError
    from ..engine.engine_client import EngineClient, EngineDead, WorkerFailed
    from ..progress import StartupProgress
    from ..text.tokenizer import TokenizerLoadError

    client = EngineClient(config)
    try:
        prompts, stop_token_ids = prompts_to_measure(config, args.data)
        with StartupProgress() as progress:
            ready = await client.start(progress)
        stop = sorted({*stop_token_ids, *ready.eos_token_ids})
        figures = [
            await _measure_at(client, temperature, prompts, stop, args)
            for temperature in temperatures
        ]
    except (PromptError, TokenizerLoadError, OSError) as error:
        raise ConfigError(str(error).rstrip(".")) from None
    except (WorkerFailed, EngineDead, MeasurementFailed) as error:
        print(f"slipstream bench acceptance: error: {error}", file=sys.stderr)
        return None
    finally:
        await client.shutdown()
    return {
        "kind": "acceptance",
        "drafter": args.drafter,
        "model": config.server.served_model_name[0],
        "runs": figures,
    }


def prompts_to_measure(config: Config, data: str) -> tuple[list[MeasuredPrompt], set[int]]:
    """The tokenized prompts of the file `data`, or of "builtin", and the tokens that end a reply.

    Raises PromptError, TokenizerLoadError or OSError.
    """
    from ..drafters.acceptance import MeasuredPrompt
    from ..drafters.training_prompts import heldout_prompts, read_prompts, tokenize_prompts
    from ..text.tokenizer import Tokenizer

    model = config.model
    tokenizer = Tokenizer.load(model.tokenizer or model.model, model.revision)
    template = tokenizer.load_template(config.server.chat_template)
    prompts = heldout_prompts() if data == "builtin" else read_prompts(Path(data))
    prompts = [p for p in prompts if p.is_heldout] or prompts
    ids = tokenize_prompts(prompts, tokenizer, template)
    pairs = zip(ids, prompts, strict=True)
    return [MeasuredPrompt(tuple(found), p.domain) for found, p in pairs], set(tokenizer.eos_ids)


async def _measure_at(
    client: EngineClient,
    temperature: float,
    prompts: list[MeasuredPrompt],
    stop: list[int],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure at one temperature and print the table; returns the figures for the JSON."""
    from ..drafters.acceptance import measure_acceptance, table, total
    from ..progress import CountProgress

    with CountProgress(f"temperature {temperature:g}", len(prompts), "replies") as bar:
        tallies = await measure_acceptance(
            client, prompts, temperature, args.max_tokens, stop, args.concurrency, bar.update
        )
    print(f"temperature {temperature:g}, {len(prompts)} prompts")
    print(table(tallies, args.num_speculative_tokens), flush=True)
    return {
        "temperature": temperature,
        "all": total(tallies).as_dict(),
        "domains": {name: tally.as_dict() for name, tally in sorted(tallies.items())},
    }
