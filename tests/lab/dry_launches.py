"""Prints the kernels that a start on an H100 would compile, and those that later steps would add.

Usage: `dry_launches.py MODEL DRAFTER CASE [few]`, where CASE is alone, drafting, eager, fp8,
invariant, mtp, ranks, engines or exchange; fp8 is drafting with an fp8 KV cache, invariant with
`--batch-invariant`, mtp with the model's own module, ranks on two GPUs that divide the drafter,
engines is mtp on two engines that share experts, and exchange the same with `--all2all-backend
all_to_all`. With `few`, each sampling option is combined with one way to draw instead of three.
`test_compile_ahead.py` runs it in a process of its own, since Triton decides at import whether it
compiles or interprets. Nothing is compiled; the script only counts the specializations of each
kernel.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.kernels.compile_ahead import compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan
from slipstream.runner.startup import dry_start
from slipstream.runner.startup.compile_ahead import STAGES

H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 132)
PROMPTS = ([1], [2], [3, 1], [16], [33, 1, 1], [90], [17, 40, 5], [65] * 3)
KINDS = (
    SamplingParams(seed=0, max_tokens=8, temperature=0.0),
    SamplingParams(seed=1, max_tokens=8, has_own_seed=True),
    SamplingParams(seed=2, max_tokens=8, top_p=0.5, top_k=3),
)
# Every option that changes how tokens are chosen, each alone, greedy and drawn by either seed.
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 2}, {"top_k": 3}, {"top_p": 0.5},
    {"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"allowed_token_ids": [3, 4]},
    {"bad_words_token_ids": [[3, 4], [5]]}, {"min_tokens": 3, "stop_token_ids": [2]},
)  # fmt: skip
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.7, "has_own_seed": True}
)  # fmt: skip


class Counting(Executor):
    """An executor that compiles nothing and records the specialization of each kernel."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.kernels: set[Any] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        source = inspect.getclosurevars(fn).nonlocals["src"]
        self.kernels.add(source.fn)
        names = source.fn.arg_names
        by_16 = [names[at[0]] for at, value in source.attrs.items() if value]
        constants = {names[at[0]]: value for at, value in source.constants.items()}
        types = [kind for kind in source.signature.values() if kind != "constexpr"]
        kind = f"{source.name}({constants}, by 16: {by_16}, {types})"
        if kind not in self.kinds:
            self.kinds.append(kind)
        future: Future[Any] = Future()
        future.set_result(True)
        return future


# Mixed steps: one request more than decodes run in them, and the tokens of the prompt beside them.
MIXED = ((9, 17), (12, 64), (18, 100), (33, 33), (39, 30))
# Numbers of tokens that a drafter has missed of each request.
MISSED = (1, 2, 3, 4, 6, 10, 15, 31, 40, 64)


def serve(
    runner: Any,
    prompts: list[int],
    kinds: Sequence[SamplingParams],  # of the requests in turn
    step_id: int,
    has_grammar: bool = False,
    long_prompt: int = 0,
) -> None:
    """Run a prefill of each of these lengths in one batch, then three decodes.

    With `long_prompt`, a prefill of that length then replaces the last request and runs beside
    decodes of the others.
    """
    drafts: int = runner.facts.needs.num_speculative_tokens
    words, facts = -(-runner.facts.vocab_size // 32), runner.facts
    columns = [-(-facts.max_model_len // group.block_size) for group in facts.kv_groups]
    blocks = [list(range(1, 1 + min(39, count))) for count in columns]

    def run(plan: StepPlan) -> None:
        mask = None
        if has_grammar and plan.rows:
            num_logits = sum(row.num_draft_tokens + 1 for row in plan.rows)
            mask = np.full((num_logits, words), -1, dtype=np.int32)
        runner.forward(plan)
        handle = runner.sample(plan, mask)
        if handle.done() and (error := handle.error()) is not None:
            raise error

    new = [
        NewRequest(slot, [0] * length, length, 0, blocks, kinds[slot % len(kinds)])
        for slot, length in enumerate(prompts)
    ]
    rows = [ScheduledRow(slot, length, 0, 0, False, 0) for slot, length in enumerate(prompts)]
    run(StepPlan(step_id, new_requests=new, rows=rows))
    for step in range(3):
        rows = [
            ScheduledRow(slot, drafts + 1, drafts, length + step, False, step + 1)
            for slot, length in enumerate(prompts)
        ]
        run(StepPlan(step_id + 1 + step, rows=rows))
    slots = list(range(len(prompts)))
    if long_prompt:
        decodes = [
            ScheduledRow(slot, drafts + 1, drafts, prompts[slot] + 3, False, 4)
            for slot in slots[:-1]
        ]
        last = slots[-1]
        again = NewRequest(last, [0] * long_prompt, long_prompt, 0, blocks, kinds[0])
        prefill = ScheduledRow(last, long_prompt, 0, 0, False, 0)
        run(StepPlan(step_id + 4, freed_slots=[last]))
        run(StepPlan(step_id + 5, new_requests=[again], rows=[*decodes, prefill]))
    run(StepPlan(step_id + 6, freed_slots=slots))


def catch_up(runner: Any, num_reqs: int, missed: list[int], step_id: int) -> None:
    """Run a decode for each number in `missed`, of tokens that the drafter has missed of each of
    `num_reqs` requests."""
    blocks = [[1, 2, 3] for _ in runner.facts.kv_groups]
    new = [NewRequest(slot, [0], 1, 0, blocks, KINDS[0]) for slot in range(num_reqs)]
    plans = [
        StepPlan(
            step_id, new_requests=new, rows=[ScheduledRow(it.slot, 1, 0, 0, False, 0) for it in new]
        )
    ]
    for at, count in enumerate(missed):
        rows = [ScheduledRow(it.slot, 1, 0, count, False, count, count) for it in new]
        plans.append(StepPlan(step_id + 1 + at, rows=rows))
    plans.append(StepPlan(step_id + 1 + len(missed), freed_slots=list(range(num_reqs))))
    for plan in plans:
        runner.forward(plan)
        handle = runner.sample(plan, None)
        if handle.done() and (error := handle.error()) is not None:
            raise error


class Stages:
    """The specializations seen by the end of each stage, and all of them at the end."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting
        self.kinds: dict[str, set[str]] = {}

    def reached(self, stage: str) -> None:
        """Note the end of a stage; the dry start calls this."""
        self.kinds[stage] = set(self._counting.kinds)

    def early(self, assumed: Stages) -> list[str]:
        """The specializations that come in an earlier stage than the dry start assumed.

        The worker waits for one stage at a time, so it would have to compile them itself.
        """
        assert list(self.kinds) == list(assumed.kinds) == list(STAGES)
        return sorted(
            f"{stage}: {kind}"
            for stage, kinds in self.kinds.items()
            for kind in kinds - assumed.kinds[stage]
        )


def each_option(few: bool) -> list[list[SamplingParams]]:
    """Return each option with each way to draw, alternately alone and with a plain request.

    With `few`, each option has one way to draw, and the ways take turns."""
    plain = SamplingParams(seed=1, max_tokens=8, has_own_seed=True)
    kinds = [
        SamplingParams(seed=3, max_tokens=8, **option, **draw)
        for at, option in enumerate(OPTIONS)
        for draw in ([DRAWS[at % len(DRAWS)]] if few else DRAWS)
    ]
    return [[kind, plain] if index % 2 else [kind] for index, kind in enumerate(kinds)]


def many(num_reqs: int, chance: random.Random) -> list[list[int]]:
    """Random prompt lengths per bucket that finish together; each row then verifies drafts."""
    counts = [2, 17, num_reqs, chance.randint(1, num_reqs), chance.randint(1, num_reqs)]
    return [[chance.randint(1, 4) for _ in range(count)] for count in counts]


def forget(counting: Counting) -> None:
    """Clear the caches, so that the next start finds no kernel."""
    for kernel in counting.kernels:
        kernel.device_caches.clear()


def launches(
    model: str,
    drafter: str | None,
    enforce_eager: bool,
    few: bool,
    kv_cache_dtype: str = "auto",
    ranks: int = 1,
    engines: int = 1,
    backend: str = "allgather_reducescatter",
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """Count the specializations of a dry start; list those that a real start meets in an earlier
    stage, and those that only later steps launch."""
    speculative = SpeculativeConfig()
    scheduler = SchedulerConfig(max_num_seqs=39, max_num_batched_tokens=200)
    if drafter is not None:
        scheduler = SchedulerConfig(max_num_seqs=44, max_num_batched_tokens=200)
        own = {"method": "mtp"} if drafter == "mtp" else {"method": "eagle3", "model": drafter}
        speculative = SpeculativeConfig(
            **own,
            num_speculative_tokens=3,
            load_format="dummy",
            draft_tensor_parallel_size=ranks,  # type: ignore[arg-type]
        )
    config = Config(
        model=ModelConfig(model=model, load_format="dummy", device="cuda"),
        cache=CacheConfig(kv_cache_dtype=kv_cache_dtype),
        scheduler=scheduler,
        speculative=speculative,
        parallel=ParallelConfig(
            ranks, engines, enable_expert_parallel=engines > 1, all2all_backend=backend
        ),
        # Other linear kernels in every bucket of rows, and sizes that are not powers of two.
        graph=GraphConfig(
            linear_backend="triton",
            cudagraph_capture_sizes=(1, 3, 24, 40, 120),
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
        ),
    )
    counting = Counting()
    with compiling_only(counting):
        assumed = Stages(counting)
        dry_start.dry_start(dry_start.any_limits(config), assumed.reached, config.scheduler)
        started = set(counting.kinds)
    forget(counting)
    counting = Counting()
    with compiling_only(counting), patch.object(dry_start, "shorten"):
        own = Stages(counting)
        runner = dry_start.dry_start(config, own.reached)
        of_all_kinds = many(scheduler.max_num_seqs, random.Random(7))
        batches = [(prompts, [KINDS[index % 3]]) for index, prompts in enumerate(PROMPTS)]
        for index, prompts in enumerate(of_all_kinds):
            kinds = [KINDS[index % len(KINDS)]] if few else KINDS
            batches += [(prompts, [params]) for params in kinds]
        batches += [([5, 3], kinds) for kinds in each_option(few)]
        with torch.inference_mode():
            for index, (prompts, kinds) in enumerate(batches):
                assert sum(prompts) <= scheduler.max_num_batched_tokens
                serve(runner, prompts, kinds, 1 + 10 * index)
            at = 1 + 10 * (len(batches) + 12)
            for index, (num_reqs, long_prompt) in enumerate(MIXED):
                serve(runner, [2] * num_reqs, [KINDS[0]], at + 10 * index, False, long_prompt)
            most = runner.facts.needs.max_deferred_tokens
            missed = sorted({min(count, most) for count in MISSED}) if most else []
            for index, num_reqs in enumerate((1, 3, 6, 11, 23, scheduler.max_num_seqs)):
                catch_up(runner, num_reqs, missed, at + 100 * (1 + index))
            for index, kinds in enumerate(each_option(few)[: 4 if few else 12]):
                serve(runner, [5, 3], kinds, 1 + 10 * (len(batches) + index), has_grammar=True)
    forget(counting)
    later = sorted(set(counting.kinds) - started)
    return {"started": len(started), "early": own.early(assumed), "later": later}


def main(model: str, drafter: str, case: str, extent: str = "all") -> None:
    """Print a line of JSON for the model alone, with the drafter, or with it and without graphs."""
    sharing = ("engines", "exchange")
    with without_gpu(H100):
        found = launches(
            model,
            None if case == "alone" else "mtp" if case in ("mtp", *sharing) else drafter,
            case == "eager",
            extent == "few",
            "fp8" if case == "fp8" else "auto",
            2 if case == "ranks" else 1,
            2 if case in sharing else 1,
            "all_to_all" if case == "exchange" else "allgather_reducescatter",
            case == "invariant",
        )
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
