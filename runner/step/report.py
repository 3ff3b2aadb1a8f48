"""What the worker says once it is ready: graphs, kernels, memory by purpose, time by phase."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ...kernels.compile_log import CompileLog
from ..graphs.manager import CaptureReport, MemoryByPurpose

logger = logging.getLogger(__name__)


def log_startup(
    reports: Sequence[CaptureReport],
    memory: MemoryByPurpose,
    seconds: Mapping[str, float],
    compilations: CompileLog,
) -> None:
    """One line for each graph manager, one for kernels, one for memory, one for time. From here on
    a kernel that has to be compiled is a fault."""
    captured = [report for report in reports if report.num_graphs]
    for report in captured:
        logger.info("%s", report.line())
    if captured:
        memory.add("graphs", sum(report.memory_bytes for report in captured))
    if compilations.compiled or compilations.num_cached:
        logger.info("%s", compilations.line())
    compilations.is_ready = True
    logger.info("%s", memory.line())
    phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    logger.info("started in %.1f s: %s", sum(seconds.values()), phases)
