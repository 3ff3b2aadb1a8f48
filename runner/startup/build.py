"""Builds a model runner that is ready for its first step: load, warm up, capture, measure."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...configs.schema import Config
from ...kernels.compile_log import watch_compilations
from ..graphs.capture import spare_modules
from ..parallel.engine_group import EngineGroup
from ..parallel.ranks import Ranks
from ..step.model_runner import ModelRunner
from ..step.parts import RunnerParts
from ..step.report import log_startup
from ..step.step_timing import measure_steps
from ..step.warm_up import warm_up_steps
from .assembly import ProgressFn, assemble
from .batch_invariant import check_rounding
from .compile_ahead import STEPS, CompileAhead


def build_model_runner(
    config: Config,
    progress: ProgressFn,
    ahead: CompileAhead | None = None,
    ranks: Ranks | None = None,
    create: Callable[[RunnerParts], ModelRunner] = ModelRunner,
    engines: EngineGroup | None = None,
) -> ModelRunner:
    """Load, allocate, warm up, capture and measure; the runner is then ready for its first step.

    With `ranks`, it is one rank's; `create` then makes a runner that tells the other ranks.
    `engines` share its experts, and build theirs at the same time.
    """
    if torch.cuda.is_available():
        spare_modules()
    parts = assemble(config, progress, ahead, ranks, engines)
    runner = create(parts)
    seconds = runner.facts.startup_seconds
    start = time.monotonic()
    check_rounding(parts.target.model)
    runner.warm_up()
    seconds["warm_up"] = time.monotonic() - start
    start = time.monotonic()
    runner.capture()
    seconds["capture"] = time.monotonic() - start
    if runner.facts.device == "cuda":
        if ahead is not None:
            ahead.wait_for(STEPS)
        start = time.monotonic()
        warm_up_steps(runner)
        seconds["first_steps"] = time.monotonic() - start
    if ahead is not None and ahead.wait() is not None:
        seconds["compile"] = ahead.seconds
    if len(config.speculative.draft_counts) > 1:
        start = time.monotonic()
        runner.facts.step_seconds.update(measure_steps(runner, config, engines))
        seconds["measure_steps"] = time.monotonic() - start
    log_startup(runner.capture_reports(), parts.memory, seconds, watch_compilations())
    return runner
