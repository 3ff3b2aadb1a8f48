"""The model runner on a GPU: its text is correct in every graph mode, and no step waits."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))

from plan_maker import PlanMaker  # noqa: E402
from tiny_target import VOCAB, Oracle, TinySetup, make_runner, tiny_llama  # noqa: E402
from torch import Tensor  # noqa: E402

from slipstream.configs.graphs import CUDAGraphMode  # noqa: E402
from slipstream.runner.messages import SamplingParams  # noqa: E402
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan  # noqa: E402
from slipstream.speculators.base import BaseSpeculator, DraftInputs, SpeculatorNeeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(device=torch.device("cuda", 0))


@pytest.fixture(scope="module")
def oracle(model: Any) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    ("mode", "whole"),
    [(mode, False) for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")]
    + [("FULL_DECODE_ONLY", True), ("FULL_AND_PIECEWISE", True)],
)
def test_random_plans_generate_the_text_of_a_full_recomputation(
    model: Any, oracle: Oracle, depth: int, num_drafts: int, mode: str, whole: bool
) -> None:
    rng = random.Random(f"{depth} {num_drafts} {mode}")
    dice = random.Random(rng.random())  # its own generator, since the runner's thread uses it

    def script(slot: int, known: list[int]) -> list[int]:
        drafts = oracle.continuation(known, dice.randint(0, num_drafts))
        return [dice.choice([draft, draft, draft, dice.randrange(VOCAB), -1]) for draft in drafts]

    device = torch.device("cuda", 0)
    setup = TinySetup(num_drafts=num_drafts, device=device, mode=CUDAGraphMode[mode], whole=whole)
    runner = make_runner(model, setup, script if num_drafts else None)
    runner.warm_up()
    runner.capture()
    maker = PlanMaker(runner, oracle, rng, depth, num_drafts)
    jobs = [maker.add(rng.randint(1, 30), rng.randint(1, 25)) for _ in range(12)]
    maker.run()
    runner.shutdown()
    assert len(maker.done) == len(jobs)


class Echo(BaseSpeculator):
    """Drafts the newest token twice, with tensor operations only, so that nothing waits."""

    needs = SpeculatorNeeds(num_speculative_tokens=2)

    def propose(self, inputs: DraftInputs) -> Tensor:
        slots = inputs.idx_mapping[: inputs.num_reqs]
        return inputs.requests.last_sampled_tokens[slots][:, None].expand(-1, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "has_own_seed": True},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"frequency_penalty": 0.5, "logprobs": 3, "logit_bias": {5: 2.0}},
    ],
)
@pytest.mark.parametrize("mode", ["NONE", "FULL", "whole"])
def test_a_step_never_waits_for_the_gpu(model: Any, mode: str, options: dict[str, Any]) -> None:
    device, whole = torch.device("cuda", 0), mode == "whole"
    graphs = CUDAGraphMode["FULL_DECODE_ONLY" if whole else mode]
    setup = TinySetup(num_drafts=2, device=device, mode=graphs, compare=False, whole=whole)
    runner = make_runner(model, setup, speculator=Echo())
    runner.capture()

    def run_steps(first_step: int) -> list[Any]:
        plan = StepPlan(first_step, freed_slots=[0, 1])
        for slot in (0, 1):
            sampling = SamplingParams(**({"seed": 3, "max_tokens": 20} | options))
            blocks = [list(range(1 + 9 * slot, 9 + 9 * slot))]
            plan.new_requests.append(NewRequest(slot, [1, 2, 3], 3, 0, blocks, sampling))
            plan.rows.append(ScheduledRow(slot, 3, 0, 0, False, 0))
        handles = [runner.execute(plan)]
        for step in range(1, 4):
            rows = [ScheduledRow(slot, 3, 2, 3 * step, False, step) for slot in (0, 1)]
            handles.append(runner.execute(StepPlan(first_step + step, rows=rows)))
        return handles

    expected = [handle.get() for handle in run_steps(0)]  # compiles kernels
    runner.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        handles = run_steps(10)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [handle.get() for handle in handles]
    runner.shutdown()
    texts = [[result.token_ids for result in step] for step in expected]
    assert [[result.token_ids for result in step] for step in found] == texts


@pytest.mark.parametrize("speculator", [None, Echo()], ids=["plain", "drafts"])
def test_results_are_kept_until_a_slow_copy_has_read_them(
    model: Any, oracle: Oracle, speculator: BaseSpeculator | None
) -> None:
    """Steps run far ahead of the copies, so a replay must wait until the copies have ended."""
    drafts = 0 if speculator is None else 2
    setup = TinySetup(
        num_drafts=drafts, device=torch.device("cuda", 0), mode=CUDAGraphMode.FULL_DECODE_ONLY,
        compare=False, whole=True,
    )  # fmt: skip
    runner = make_runner(model, setup, speculator=speculator)
    runner.capture()
    plan, prompts = StepPlan(0), {2: [1, 2, 3], 0: [9, 8, 7]}
    for slot, prompt in prompts.items():
        sampling = SamplingParams(seed=3, max_tokens=30, temperature=0.0)
        blocks = [list(range(1 + 9 * slot, 9 + 9 * slot))]
        plan.new_requests.append(NewRequest(slot, prompt, 3, 0, blocks, sampling))
        plan.rows.append(ScheduledRow(slot, 3, 0, 0, False, 0))
    plans = [plan]
    for step in range(1, 8):
        at = 3 + (step - 1) * (drafts + 1)
        rows = [ScheduledRow(slot, drafts + 1, drafts, at, False, step) for slot in prompts]
        plans.append(StepPlan(step, rows=rows))
    handles = []
    for each in plans:
        with torch.cuda.stream(runner._copy_stream.stream):
            torch.cuda._sleep(20_000_000)
        handles.append(runner.execute(each))
    steps = [handle.get() for handle in handles]
    runner.shutdown()
    for row, prompt in enumerate(prompts.values()):
        text = [token for results in steps for token in results[row].token_ids]
        assert len(text) >= 8 and text == oracle.continuation(prompt, len(text))


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "has_own_seed": True},
    {"temperature": 1.2},  # its drafts are verified by rejection sampling
    {"temperature": 0.0, "frequency_penalty": 0.9},
    {"temperature": 0.0, "logprobs": 2},
]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_graphs_of_whole_steps_equal_eager_steps_for_all_sampling_options(
    model: Any, oracle: Oracle, num_drafts: int
) -> None:
    texts = []
    for mode, whole in (("NONE", False), ("FULL_DECODE_ONLY", True)):
        rng = random.Random(num_drafts)
        drafts = random.Random(1)

        def script(slot: int, known: list[int], drafts: random.Random = drafts) -> list[int]:
            right = oracle.continuation(known, num_drafts)
            return [drafts.choice([draft, draft, drafts.randrange(VOCAB)]) for draft in right]

        setup = TinySetup(
            num_drafts=num_drafts, device=torch.device("cuda", 0), mode=CUDAGraphMode[mode],
            whole=whole,
        )  # fmt: skip
        runner = make_runner(model, setup, script if num_drafts else None)
        runner.capture()
        maker = PlanMaker(runner, None, rng, 2, num_drafts)
        jobs = [
            maker.add(rng.randint(1, 20), 20, seed=index, **option)
            for index, option in enumerate((*OPTIONS[:3], *OPTIONS, *OPTIONS[:3]))
        ]
        maker.run()
        runner.shutdown()
        texts.append([job.tokens for job in jobs])
    assert texts[0] == texts[1]
