"""Logs the worker's start-up: graphs, kernels, memory by purpose, time by phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from ...configs.schema import StepLimits
from ...kernels.compile_log import CompileLog
from ..graphs.manager import CaptureReport
from ..graphs.settings import GraphSettings

logger = logging.getLogger(__name__)


def log_limits(limits: StepLimits, reason: str, graphs: GraphSettings | None) -> None:
    """Log the limits of a step, the flags that set them, and which steps get a CUDA graph."""
    captured = "without CUDA graphs"
    if graphs is not None:
        captured = f"CUDA graphs for up to {graphs.sizes[-1]} tokens (--cudagraph-capture-sizes)"
    logger.info(
        "a step has at most %d requests (--max-num-seqs) and %d tokens (--max-num-batched-tokens):"
        " %s; %s",
        limits.max_num_seqs, limits.max_num_batched_tokens, reason, captured,
    )  # fmt: skip


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
