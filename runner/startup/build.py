"""Builds a model runner that is ready for its first step: load, warm up, capture, measure."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from ...configs.schema import Config
from ...kernels.compile_log import CompileLog, watch_compilations
from ..graphs.capture import spare_modules
from ..graphs.manager import CaptureReport
from ..parallel.engine_group import EngineGroup
from ..parallel.ranks import Ranks
from ..step.model_runner import ModelRunner
from ..step.parts import RunnerParts
from ..step.step_timing import measure_steps
from ..step.warm_up import warm_up_steps
from .assembly import ProgressFn, assemble
from .batch_invariant import check_rounding
from .compile_ahead import STEPS, CompileAhead

logger = logging.getLogger(__name__)


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


def log_startup(
    reports: Sequence[CaptureReport],
    memory: Counter[str],  # bytes by purpose
    seconds: Mapping[str, float],
    compilations: CompileLog,
) -> None:
    """Log one line for each graph manager, and one each for kernels, memory and time.

    It marks the start-up as finished: a compilation after it is reported as a fault.
    """
    captured = [report for report in reports if report.num_graphs]
    for report in captured:
        logger.info("%s", report.line())
    if captured:
        memory["graphs"] += sum(report.memory_bytes for report in captured)
    if compilations.compiled or compilations.num_cached:
        logger.info("%s", compilations.line())
    compilations.is_ready = True
    purposes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory.items())
    logger.info("memory: %s", purposes)
    phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    logger.info("started in %.1f s: %s", sum(seconds.values()), phases)
