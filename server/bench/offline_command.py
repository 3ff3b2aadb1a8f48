"""`slipstream bench offline`: measure the engine's decode speed by batch size, without HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

from ...configs.hosts import check_one_host
from ...configs.load import add_flags, load_config
from ...configs.logs import share_bars_between_threads
from ...configs.options import ConfigError
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

SUMMARY = "measure the engine's decode speed by batch size, with and without speculation"
_SPARE = 64  # positions after the longest request, for drafts
_VALUES: Values = {
    "--input-len": (128, "length of each request's random prompt, in tokens"),
    "--output-len": (256, "decode tokens measured for each request"),
    "--num-iters": (
        2,
        "timed runs of each batch size, of which the fastest counts; with a drafter, the mean "
        "counts, and small batches are repeated to 8 requests",
    ),
    "--num-warmup": (1, "runs before the timed ones"),
    "--bench-seed": (0, "random seed of the prompts"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench", "What is measured.")
    group.add_argument(
        "--batch-sizes", metavar="LIST", default="1,8,32", help="batch sizes (default: 1,8,32)"
    )
    add_values(group, _VALUES)
    group.add_argument(
        "--same-prompts",
        action="store_true",
        help="use the same prompts in all runs of a batch size, so that with "
        "--enable-prefix-caching only the first run computes them",
    )
    group.add_argument(
        "--compare-off",
        action="store_true",
        help="also measure an engine without a drafter, before the other",
    )
    group.add_argument(
        "--peak-bandwidth",
        type=float,
        metavar="BYTES/S",
        help="peak memory bandwidth, for the roofline (default: measured, for H100 and H200)",
    )
    add_output(group)
    group.add_argument("--plot", metavar="FILE", help="draw tokens/s over batch size as PNG")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    from ..drafters.acceptance import MeasurementFailed
    from ..engine.engine_client import WorkerFailed
    from .offline import Workload
    from .output import check_plot

    try:
        batch_sizes = [int(part) for part in args.batch_sizes.split(",")]
    except ValueError:
        raise ConfigError(
            f"--batch-sizes must be integers separated by commas, not {args.batch_sizes!r}"
        ) from None
    check_least(args, {"input_len": 1, "output_len": 1, "num_iters": 1, "num_warmup": 0})
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes must each be at least 1, not {args.batch_sizes}")
    check_plot(args.plot)
    check_file("--output", args.output)
    load = Workload(
        tuple(batch_sizes),
        args.input_len,
        args.output_len,
        args.num_iters,
        args.num_warmup,
        args.bench_seed,
        args.same_prompts,
    )
    try:
        with tables_to_stderr(args.output):
            figures = _figures(_configs(args, load), load, args)
    except (WorkerFailed, MeasurementFailed) as error:
        print(f"slipstream bench offline: error: {error}", file=sys.stderr)
        return 1
    write_figures(args.output, figures)
    return 0


def _figures(configs: list[Config], load: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure each configuration, print the comparison, and draw the plot if one is wanted."""
    from .offline import gains
    from .output import plot_offline

    runs = [asyncio.run(_measure(config, load, args)) for config in configs]
    for text in gains(runs):
        print(text)
    figures = {
        "kind": "offline",
        "model": configs[0].server.served_model_name[0],
        "input_len": load.input_len,
        "output_len": load.output_len,
        "runs": runs,
    }
    if args.plot:
        plot_offline(figures, args.plot)
    return figures


def _configs(args: argparse.Namespace, load: Any) -> list[Config]:
    """The configuration of the flags; with --compare-off, the same without speculation first."""
    flags = dict(vars(args))
    needed = load.input_len + load.output_len + 1 + _SPARE
    flags.setdefault("max_model_len", str(needed))
    flags.setdefault("max_num_seqs", str(max(load.batch_sizes)))
    flags.setdefault("enable_prefix_caching", False)
    flags.setdefault("load_format", "auto")
    config = check_one_host(load_config(flags, os.environ))
    if (config.scheduler.max_num_seqs or 0) < max(load.batch_sizes):
        raise ConfigError("--max-num-seqs must be at least the largest of --batch-sizes")
    configs = [config]
    if args.compare_off and config.speculative.method != "off":
        configs.insert(0, load_config(flags | {"speculative_config": "off"}, os.environ))
    return configs


async def _measure(config: Config, load: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, measure and print each batch size; returns the run's figures."""
    from tqdm import tqdm

    from ..progress import StartupProgress
    from .offline import OfflineBench, heading, line, peak_bandwidth

    share_bars_between_threads()
    async with AsyncExitStack() as stack:
        with StartupProgress() as progress:
            bench = await stack.enter_async_context(OfflineBench(config, progress))
        ready = bench.ready
        peak = args.peak_bandwidth or peak_bandwidth(ready.device_name)
        phases = ", ".join(f"{name} {s:.1f}" for name, s in ready.startup_seconds.items())
        print(f"{bench.name}: start-up {bench.startup_seconds:.1f} s ({phases})")
        print(heading(peak), flush=True)
        rows = []
        with tqdm(
            total=load.num_runs(bench.speculates), desc=bench.name, leave=False, disable=None
        ) as bar:
            for batch_size in load.batch_sizes:
                row = await bench.measure(batch_size, load, peak, lambda: bar.update())
                rows.append(row)
                bar.clear()
                print(line(row), flush=True)
        return {
            "name": bench.name,
            "speculative_method": ready.speculative_method,
            "num_speculative_tokens": ready.num_speculative_tokens,
            "device": ready.device_name or ready.device,
            "dtype": ready.dtype,
            "weight_formats": ready.weight_formats,
            "attention_backend": ready.attention_backend,
            "startup_s": round(bench.startup_seconds, 3),
            "startup_phases_s": {k: round(v, 3) for k, v in ready.startup_seconds.items()},
            "weight_bytes": ready.weight_bytes,
            "expert_bytes": ready.expert_bytes,
            "draft_weight_bytes": ready.draft_weight_bytes,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "peak_bandwidth": peak,
            "results": rows,
        }
