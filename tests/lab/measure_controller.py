"""Measures whether a chosen K is as fast as the best fixed one, and never slower than none.

`PYTHONPATH=.src python tests/lab/measure_controller.py MODEL DRAFTER`, MODEL and an EAGLE-3 head as
`shapes.py` writes them. One engine with random weights, one process: K is held at 0, 1, ... by the
controller that chooses it otherwise, and drafts are accepted by chance, at rates that change while
it runs. Ends with status 1 if auto is below 0.97 of the best, in any cell. Before, in an engine of
its own, the same steps without a drafter: what K = 0 costs beside that is in every /off.

Tokens/s are those that the steps bring on the average: rates are known, so that a step of n
requests which verified k drafts counts n (1 + r1 + ... + rk), however lucky it was. (At batch 1
luck alone is worth several per cent.) What came in truth stands beside it. No time holds prompts.

* Fixed K: one set of requests, K = 0, 1, ... with good drafts, then ..., 1, 0 with poor ones, for
  the same mean context; the steps after a change of K do not count. A step takes as long whatever
  stands of its drafts, so both of a K's times count for both acceptances.
* Auto: new requests, a controller that has seen nothing, the step times measured at start-up, as
  after a start of the server. Everything counts from the first step behind the prompts, what is
  lost until it knows included. Mean context as with fixed K.
* Shifting: good, poor, good, each until as many tokens have come; for fixed K from its speeds.
* Off again: as auto, behind it, but K is held at 0. Off is the mean of both, since a card becomes
  slower as it warms; where they differ, the figures are no better.
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

from held_engine import HeldEngine, Phase, Rates, brought, joined  # isort: skip

PROMPT = 128
BOUND = 0.97
DROPPED = 4  # steps after a change of a held K: two were in flight, and a drafter catches up
# Batch -> tokens of each request in one third of an auto run, counted steps of a held K. Small
# batches learn from few drafts a step and need longer; large ones take long for a step.
LENGTHS = {1: (512, 24), 4: (384, 24), 16: (256, 24), 64: (192, 20), 128: (128, 20), 256: (96, 16)}


def lengths(batch: int, scale: float) -> tuple[int, int]:
    """As in LENGTHS, for any batch size."""
    third, num = LENGTHS[min(LENGTHS, key=lambda size: abs(size - batch))]
    return max(4, round(third * scale)), max(4, round(num * scale))


def without_drafter(config: Config, batches: Sequence[int], scale: float) -> dict[int, float]:
    """Seconds of a step by batch size, at the contexts of the other cells."""
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
    """For each K its two phases, with good and with poor drafts."""
    each = sum(brought(rates, k) for rates in (good, poor) for k in bench.counts)
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


def chosen(bench: HeldEngine, batch: int, laws: Sequence[Rates], tokens: float) -> list[Phase]:
    """K = auto: one phase for each of `laws`."""
    bench.forget()
    names = bench.begin(batch, PROMPT, laws[0])
    phases = [bench.run(rates, tokens=batch * tokens) for rates in laws]
    bench.end(names)
    return phases


def measure(
    bench: HeldEngine, batch: int, good: Rates, poor: Rates, scale: float, alone: float | None
) -> Any:
    """All cells of a batch size, and what steps take; `alone`: without a drafter."""
    third, num = lengths(batch, scale)
    fixed = held(bench, batch, good, poor, third, num)
    means = [sum(p.seconds for p in pair) / sum(len(p.steps) for p in pair) for pair in fixed]
    laws = {"good": [good] * 3, "poor": [poor] * 3, "shifting": [good, poor, good]}
    phases = {name: chosen(bench, batch, law, third) for name, law in laws.items()}
    known = bench.controller.costs.row(batch)
    bench.controller.hold(0)
    names = bench.begin(batch, PROMPT + third, poor)
    again = bench.run(poor, tokens=batch * third).speed * means[0] / batch
    bench.end(names)
    means[0] *= 2 / (1 + again)
    speeds = {
        name: [batch * brought(rates, k) / s for k, s in zip(bench.counts, means, strict=True)]
        for name, rates in (("good", good), ("poor", poor))
    }
    both = zip(speeds["good"], speeds["poor"], strict=True)
    speeds["shifting"] = [joined([well, ill, well]) for well, ill in both]
    cells = [cell_of(batch, name, phases[name], speeds[name], alone) for name in laws]
    times = [
        {
            "k": k, "start_up": bench.measured.get((batch, k)), "held": mean,
            "median": statistics.median(pair[0].steps + pair[1].steps),
            "steps": pair[0].steps + pair[1].steps, "believed": float(known[k]),
            "passes": [p.seconds / len(p.steps) for p in pair],
        }
        for k, mean, pair in zip(bench.counts, means, fixed, strict=True)
    ]  # fmt: skip
    return {"cells": cells, "times": times, "batch": batch, "off_again": again, "alone": alone}


def cell_of(
    batch: int, name: str, phases: Sequence[Phase], fixed: Sequence[float], alone: float | None
) -> dict[str, Any]:
    """What auto brought, beside each fixed K."""
    seconds = sum(phase.seconds for phase in phases)
    drafts: Counter[int] = sum((phase.drafts for phase in phases), Counter())
    auto = joined([phase.speed for phase in phases])
    return {
        "batch": batch, "acceptance": name, "fixed": fixed, "auto": auto,
        "came": sum(phase.tokens for phase in phases) / seconds,
        "to_best": auto / max(fixed), "to_off": auto * (alone / batch if alone else 1 / fixed[0]),
        "rows_by_k": dict(sorted(drafts.items())), "seconds": seconds,
    }  # fmt: skip


def show_cells(counts: Sequence[int], cells: Sequence[Any]) -> None:
    """Tokens/s by cell."""
    columns = "".join(f"{f'K={k}' if k else 'off':>9}" for k in counts)
    head = f"{'batch':>5} {'drafts':<9}{columns}{'auto':>9} {'came':>8} {'/best':>6} {'/off':>6}"
    print(f"\ntokens/s\n{head}  rows that verified K drafts")
    for cell in cells:
        fixed = "".join(f"{speed:>9,.0f}" for speed in cell["fixed"])
        total = sum(cell["rows_by_k"].values())
        shares = "  ".join(f"{k}: {100 * n / total:.0f} %" for k, n in cell["rows_by_k"].items())
        mark = "" if min(cell["to_best"], cell["to_off"]) >= BOUND else f"  BELOW {BOUND}"
        print(
            f"{cell['batch']:>5} {cell['acceptance']:<9}{fixed}{cell['auto']:>9,.0f} "
            f"{cell['came']:>8,.0f} {cell['to_best']:>6.3f} {cell['to_off']:>6.3f}  {shares}{mark}"
        )


def show_times(found: Sequence[Any]) -> None:
    """Milliseconds of a step."""
    print(
        "\nms a step: measured at start-up (short contexts); with K held, mean, median and both\n"
        "passes; what the controller believes after its last auto run; the slowest; in an engine\n"
        "without a drafter"
    )
    print(f"{'batch':>5} {'K':>3} {'start-up':>9} {'held':>8} {'median':>8} {'passes':>16} "
          f"{'believed':>9} {'slowest':>8} {'alone':>8}")  # fmt: skip
    for batch in found:
        for row in batch["times"]:
            apart = f"{1e3 * batch['alone']:.3f}" if batch["alone"] and not row["k"] else ""
            start = f"{1e3 * row['start_up']:.3f}" if row["start_up"] else "-"
            passes = " ".join(f"{1e3 * seconds:.3f}" for seconds in row["passes"])
            print(
                f"{batch['batch']:>5} {row['k']:>3} {start:>9} {1e3 * row['held']:>8.3f} "
                f"{1e3 * row['median']:>8.3f} {passes:>16} {1e3 * row['believed']:>9.3f} "
                f"{1e3 * max(row['steps']):>8.2f} {apart:>8}"
            )


def config_of(args: argparse.Namespace, batches: Sequence[int], good: Rates) -> Config:
    """As `slipstream bench offline` would make it."""
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
    add("--good", default="0.80/0.60/0.42/0.30/0.21", help="rates by position, unconditional")
    add("--poor", default="0.10/0.05/0.02/0.01/0.005")
    add("--scale", type=float, default=1.0, help="length of every cell, 1 is about 100 s in all")
    add("--kv-gib", type=float, default=36.0)
    add("--tokens", type=int, default=8192, help="max_num_batched_tokens")
    add("--max-model-len", type=int)
    add("--device", default="auto")
    add("--off-engine", action=argparse.BooleanOptionalAction, default=True)
    add("--output", help="JSON goes there")
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
            f"off again: {found[-1]['off_again']:.3f} of off; K = 0 adds {100 * costs:.1f} % to a "
            "step without a drafter",
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
