"""Measures the memory that is needed besides the KV cache: the largest step's, and the graphs'.

It decides nothing; `memory` computes the number of blocks from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..graphs.capture import GraphPool, paused_garbage_collector
from ..graphs.manager import CudaGraphManager
from ..step.target import Target
from ..step.token_graphs import TokenGraphs


@dataclass(frozen=True)
class MemoryProfile:
    """The parts of a step, to be run with a minimal KV cache."""

    small_target: Callable[[], Target]
    max_num_tokens: int
    max_logits_rows: int
    pool: GraphPool | None  # None without graphs
    graphs: CudaGraphManager | None  # the target's
    token_graphs_of: Callable[[Target], TokenGraphs | None]
    draft_graph_bytes: Callable[[Target], int]

    def run_largest_step(self) -> None:
        """Run the step that uses the most memory."""
        logits = self.small_target().warm_up(self.max_num_tokens)
        rows = self.max_logits_rows
        logits[:1].float().expand(rows, -1).softmax(-1).cumsum(-1)  # the sampler's copies

    def graph_bytes(self) -> int:
        """Estimate the bytes that all graphs will use. Keeps no graph."""
        if self.graphs is None or self.pool is None:
            return 0
        with self.pool.throw_away(), paused_garbage_collector(collect=False):
            target = self.small_target()
            total = self.graphs.profile_memory(target.create_forward_fn)
            if (token_graphs := self.token_graphs_of(target)) is not None:
                total += token_graphs.profile_memory()
            return total + self.draft_graph_bytes(target)
