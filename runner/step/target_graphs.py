"""Creates the target's graph manager, for as many of the wanted graphs as attention allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ...configs.graphs import AttentionCGSupport, CUDAGraphMode
from ..graphs.dispatch import resolve_target
from ..graphs.manager import CudaGraphManager
from ..graphs.settings import GraphSettings

logger = logging.getLogger(__name__)


class Claims(Protocol):
    """A builder of attention or of recurrent layers."""

    supports: AttentionCGSupport


def create_target_graphs(
    settings: GraphSettings | None,
    wanted: CUDAGraphMode,
    builders: Sequence[Claims],
    query_lengths: Sequence[int],  # of uniform batches, ascending
    max_num_reqs: int,
    max_num_tokens: int,
) -> tuple[CudaGraphManager | None, CUDAGraphMode]:
    """The target's graph manager and its mode; (None, NONE) without graphs."""
    if settings is None:
        return None, CUDAGraphMode.NONE
    support = min(builder.supports for builder in builders)
    decision = resolve_target(wanted, support, query_lengths)
    if decision.reason:
        by_default = wanted is CUDAGraphMode.FULL_AND_FULL
        level = logging.INFO if by_default else logging.WARNING
        logger.log(level, "target graphs run as %s: %s", decision.mode.name, decision.reason)
    is_whole = decision.mode.mixed_mode() is CUDAGraphMode.FULL
    manager = CudaGraphManager.create(
        "target",
        decision.mode,
        decision.uniform_token_counts,
        settings.sizes,
        max_num_reqs,
        max_num_tokens,
        settings.pool,
        settings.progress,
        settings.debug_compare_eager,
        settings.whole_mixed_sizes if is_whole else settings.mixed_sizes,
    )
    return manager, decision.mode
