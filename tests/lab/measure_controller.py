"""Compares the speed of K = auto with every fixed draft length K, and with no drafter.

Run `PYTHONPATH=.src python tests/lab/measure_controller.py MODEL DRAFTER` with a target and an
EAGLE-3 head from `shapes.py`; the weights are random. One engine runs all cells. The draft-length
controller chooses K or holds it fixed. Drafts are accepted at random, at rates that change while
the engine runs. The exit status is 1 if, in any cell, auto reaches less than 0.97 of the best fixed
K or of no drafter ("/off"). The speed without a drafter is measured first, in its own engine, so
that the costs of K = 0 are part of "/off".

The tokens per second are expected values, since luck alone changes a run at batch 1 by several per
cent: a step of n requests that verified k drafts counts as n (1 + r1 + ... + rk) tokens, where r
are the acceptance rates. The actual tokens per second are printed too. Prompts are not timed, nor
are steps that wait for the compilation of a kernel, which are reported.

* Fixed K: one set of requests runs K = 0, 1, ... with good drafts and then ..., 1, 0 with poor
  ones, so that the mean context is the same for each K. The first steps after a change of K are not
  counted. The time of a step does not depend on how many drafts are accepted, so both times of a K
  count for good and for poor drafts.
* Auto: new requests and a controller that only knows the step times of start-up, as in a new
  server. All steps after the prompts count, so the costs of learning are included. The mean context
  is that of the fixed K.
* Shifting: good, poor and good drafts, each for the same number of tokens. For a fixed K, this is
  calculated from its two speeds.
* Off again: K is held at 0 once more after the auto runs, because a GPU becomes slower as it warms
  up. "off" is the mean of both; their difference bounds the precision of all figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

from held_engine import HeldEngine, Phase, Rates, expected_tokens, mean_speed  # isort: skip

PROMPT = 128
BOUND = 0.97
# Steps not counted after a change of a held K: two were in flight, and the drafter must catch up.
DROPPED = 4
# Batch -> (tokens per request in a third of an auto run, counted steps per held K). Small batches
# learn from few drafts per step and need longer; the steps of large batches cost more time.
LENGTHS = {1: (512, 24), 4: (384, 24), 16: (256, 24), 64: (192, 20), 128: (128, 20), 256: (96, 16)}


def lengths(batch: int, scale: float) -> tuple[int, int]:
    """The entry of LENGTHS for the nearest batch size, scaled."""
    third, num = LENGTHS[min(LENGTHS, key=lambda size: abs(size - batch))]
    return max(4, round(third * scale)), max(4, round(num * scale))


def without_drafter(config: Config, batches: Sequence[int], scale: float) -> dict[int, float]:
    """Seconds per step by batch size, with the same contexts as in the other cells."""
    bench = HeldEngine(config)
    found = {}
    for batch in batches:
        third, num = lengths(batch, scale)
        names = bench.begin(batch, round(PROMPT + 1.5 * third - num - DROPPED), ())
        bench.run((), num_steps=DROPPED)
        phase = bench.run((), num_steps=2 * num)
        found[batch] = phase.seconds / len(phase.steps)
        bench.end(names)
    bench.close()
    return found


def held(
    bench: HeldEngine, batch: int, good: Rates, poor: Rates, third: int, num: int
) -> list[Any]:
    """Run every fixed K; returns its two phases, with good and with poor drafts."""
    each = sum(expected_tokens(rates, k) for rates in (good, poor) for k in bench.counts)
    prompt_len = max(8, round(PROMPT + 1.5 * third - (num + DROPPED) * each / 2))
    names = bench.begin(batch, prompt_len, good)
    found: dict[int, list[Phase]] = {k: [] for k in bench.counts}
    for rates, order in ((good, bench.counts), (poor, bench.counts[::-1])):
        for k in order:
            bench.controller.hold(k)
            bench.run(rates, num_steps=DROPPED)
            found[k].append(bench.run(rates, num_steps=num))
    bench.end(names)
    return list(found.values())


def chosen(bench: HeldEngine, batch: int, series: Sequence[Rates], tokens: float) -> list[Phase]:
    """Run K = auto, with one phase for each entry of `series`."""
    bench.forget()
    names = bench.begin(batch, PROMPT, series[0])
    phases = [bench.run(rates, tokens=batch * tokens) for rates in series]
    bench.end(names)
    return phases


def measure(
    bench: HeldEngine, batch: int, good: Rates, poor: Rates, scale: float, alone: float | None
) -> Any:
    """Measure all cells and step times of a batch size.

    `alone` is the time of a step without a drafter, in seconds.
    """
    third, num = lengths(batch, scale)
    fixed = held(bench, batch, good, poor, third, num)
    means = [sum(p.seconds for p in pair) / sum(len(p.steps) for p in pair) for pair in fixed]
    kinds = {"good": [good] * 3, "poor": [poor] * 3, "shifting": [good, poor, good]}
    phases = {name: chosen(bench, batch, series, third) for name, series in kinds.items()}
    known = bench.controller.costs.row(batch)
    bench.controller.hold(0)
    names = bench.begin(batch, PROMPT + third, poor)
    again = bench.run(poor, tokens=batch * third).speed * means[0] / batch
    bench.end(names)
    means[0] *= 2 / (1 + again)
    speeds = {
        name: [
            batch * expected_tokens(rates, k) / s for k, s in zip(bench.counts, means, strict=True)
        ]
        for name, rates in (("good", good), ("poor", poor))
    }
    both = zip(speeds["good"], speeds["poor"], strict=True)
    speeds["shifting"] = [mean_speed([fast, slow, fast]) for fast, slow in both]
    cells = [cell_of(batch, name, phases[name], speeds[name], alone) for name in kinds]
    times = [
        {
            "k": k, "start_up": bench.measured.get((batch, k)), "held": mean,
            "median": statistics.median(pair[0].steps + pair[1].steps),
            "steps": pair[0].steps + pair[1].steps, "estimate": float(known[k]),
            "passes": [p.seconds / len(p.steps) for p in pair],
        }
        for k, mean, pair in zip(bench.counts, means, fixed, strict=True)
    ]  # fmt: skip
    return {"cells": cells, "times": times, "batch": batch, "off_again": again, "alone": alone}


def cell_of(
    batch: int, name: str, phases: Sequence[Phase], fixed: Sequence[float], alone: float | None
) -> dict[str, Any]:
    """The figures of one cell: speeds of auto and of each fixed K, their ratios, and K's shares."""
    seconds = sum(phase.seconds for phase in phases)
    drafts: Counter[int] = sum((phase.drafts for phase in phases), Counter())
    auto = mean_speed([phase.speed for phase in phases])
    return {
        "batch": batch, "acceptance": name, "fixed": fixed, "auto": auto,
        "actual": sum(phase.tokens for phase in phases) / seconds,
        "to_best": auto / max(fixed), "to_off": auto * (alone / batch if alone else 1 / fixed[0]),
        "rows_by_k": dict(sorted(drafts.items())), "seconds": seconds,
    }  # fmt: skip


def show_cells(counts: Sequence[int], cells: Sequence[Any]) -> None:
    """Print the tokens per second of every cell."""
    columns = "".join(f"{f'K={k}' if k else 'off':>9}" for k in counts)
    head = f"{'batch':>5} {'drafts':<9}{columns}{'auto':>9} {'actual':>8} {'/best':>6} {'/off':>6}"
    print(f"\ntokens/s\n{head}  rows that verified K drafts")
    for cell in cells:
        fixed = "".join(f"{speed:>9,.0f}" for speed in cell["fixed"])
        total = sum(cell["rows_by_k"].values())
        shares = "  ".join(f"{k}: {100 * n / total:.0f} %" for k, n in cell["rows_by_k"].items())
        mark = "" if min(cell["to_best"], cell["to_off"]) >= BOUND else f"  BELOW {BOUND}"
        print(
            f"{cell['batch']:>5} {cell['acceptance']:<9}{fixed}{cell['auto']:>9,.0f} "
            f"{cell['actual']:>8,.0f} {cell['to_best']:>6.3f} {cell['to_off']:>6.3f}  "
            f"{shares}{mark}"
        )


def show_times(found: Sequence[Any]) -> None:
    """Print the milliseconds per step of every batch size and K."""
    print(
        "\nms per step: measured at start-up (short contexts); with K held, the mean, median and\n"
        "both passes; the controller's estimate after its last auto run; the slowest step; in an\n"
        "engine without a drafter"
    )
    print(f"{'batch':>5} {'K':>3} {'start-up':>9} {'held':>8} {'median':>8} {'passes':>16} "
          f"{'estimate':>9} {'slowest':>8} {'alone':>8}")  # fmt: skip
    for batch in found:
        for row in batch["times"]:
            apart = f"{1e3 * batch['alone']:.3f}" if batch["alone"] and not row["k"] else ""
            start = f"{1e3 * row['start_up']:.3f}" if row["start_up"] else "-"
            passes = " ".join(f"{1e3 * seconds:.3f}" for seconds in row["passes"])
            print(
                f"{batch['batch']:>5} {row['k']:>3} {start:>9} {1e3 * row['held']:>8.3f} "
                f"{1e3 * row['median']:>8.3f} {passes:>16} {1e3 * row['estimate']:>9.3f} "
                f"{1e3 * max(row['steps']):>8.2f} {apart:>8}"
            )


def config_of(args: argparse.Namespace, batches: Sequence[int], good: Rates) -> Config:
    """The configuration of the engine, with `good` as the first acceptance rates."""
    third = max(LENGTHS[size][0] for size in LENGTHS)
    return Config(
        model=ModelConfig(
            model=args.model,
            load_format="dummy",
            max_model_len=args.max_model_len or PROMPT + 4 * third + 256,
            device=args.device,
        ),
        cache=CacheConfig(
            enable_prefix_caching=False, kv_cache_memory_bytes=int(args.kv_gib * 2**30)
        ),
        scheduler=SchedulerConfig(max_num_seqs=max(batches), max_num_batched_tokens=args.tokens),
        speculative=SpeculativeConfig(
            method=args.method,
            model=args.drafter,
            load_format="dummy",
            synthetic_acceptance_rates=good,
            max_speculative_tokens=len(good),
        ),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("model")
    add("drafter")
    add("--method", default="eagle3")
    add("--batches", default="1,4,16,64,128,256")
    add("--good", default="0.80/0.60/0.42/0.30/0.21", help="unconditional rates by position")
    add("--poor", default="0.10/0.05/0.02/0.01/0.005")
    add("--scale", type=float, default=1.0, help="length of all cells; with 1, about 100 s")
    add("--kv-gib", type=float, default=36.0)
    add("--tokens", type=int, default=8192, help="max_num_batched_tokens")
    add("--max-model-len", type=int)
    add("--device", default="auto")
    add("--off-engine", action=argparse.BooleanOptionalAction, default=True)
    add("--output", help="file for the figures as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    good, poor = (tuple(map(float, text.split("/"))) for text in (args.good, args.poor))
    batches = [int(text) for text in args.batches.split(",")]
    began = time.perf_counter()
    config = config_of(args, batches, good)
    alone: dict[int, float] = {}
    if args.off_engine:
        alone = without_drafter(
            replace(config, speculative=SpeculativeConfig()), batches, args.scale
        )
        print(f"without a drafter: {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    bench = HeldEngine(config)
    print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
    began, found = time.perf_counter(), []
    for batch in batches:
        found.append(measure(bench, batch, good, poor, args.scale, alone.get(batch)))
        show_cells(bench.counts, found[-1]["cells"])
        costs = found[-1]["times"][0]["held"] / alone[batch] - 1 if alone else float("nan")
        print(
            f"off again: {found[-1]['off_again']:.3f} times the speed of off; K = 0 adds "
            f"{100 * costs:.1f} % to the time of a step without a drafter",
            flush=True,
        )
    bench.close()
    cells = [cell for batch in found for cell in batch["cells"]]
    show_cells(bench.counts, cells)
    show_times(found)
    low = [cell for cell in cells if min(cell["to_best"], cell["to_off"]) < BOUND]
    print(f"\nmeasured in {time.perf_counter() - began:.1f} s; {len(low)} cells below {BOUND}")
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({"good": good, "poor": poor, "found": found}, file)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
