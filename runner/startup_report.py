"""What the worker says once it is ready: what was captured, memory by purpose, time by phase."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .cuda_graphs import CaptureReport, MemoryByPurpose

logger = logging.getLogger(__name__)


def log_startup(
    reports: Sequence[CaptureReport], memory: MemoryByPurpose, seconds: Mapping[str, float]
) -> None:
    """One line for each graph manager, one for memory, one for time."""
    captured = [report for report in reports if report.num_graphs]
    for report in captured:
        logger.info("%s", report.line())
    if captured:
        memory.add("graphs", sum(report.memory_bytes for report in captured))
    logger.info("%s", memory.line())
    phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    logger.info("started in %.1f s: %s", sum(seconds.values()), phases)
