"""Settings of graph capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ...configs.schema import GraphConfig
from .capture import GraphPool
from .dispatch import capture_sizes, mixed_capture_sizes
from .manager import CudaGraphManager, ProgressFn


@dataclass(frozen=True)
class GraphSettings:
    """The settings that all graph managers of one device share."""

    pool: GraphPool
    sizes: tuple[int, ...]
    debug_compare_eager: bool = False
    progress: ProgressFn | None = None
    # of mixed batches, in pieces and whole; None = `sizes`
    mixed_sizes: tuple[int, ...] | None = None
    whole_mixed_sizes: tuple[int, ...] | None = None
    draft_loop: bool = True  # all draft decodes of a step in one graph if attention allows

    def manager(self, name: str, wanted: Sequence[BatchExecutionDescriptor]) -> CudaGraphManager:
        """A manager of the graphs `wanted`, in capture order."""
        return CudaGraphManager(name, wanted, self.pool, self.progress, self.debug_compare_eager)

    @classmethod
    def create(
        cls, config: GraphConfig, pool: GraphPool, max_num_tokens: int, progress: ProgressFn
    ) -> GraphSettings:
        """The configured settings, for steps of up to `max_num_tokens` tokens."""
        listed = config.cudagraph_capture_sizes
        return cls(
            pool,
            capture_sizes(listed, max_num_tokens),
            config.debug_compare_eager,
            progress,
            mixed_capture_sizes(listed, max_num_tokens, CUDAGraphMode.PIECEWISE),
            mixed_capture_sizes(listed, max_num_tokens, CUDAGraphMode.FULL),
            config.cudagraph_draft_loop,
        )
