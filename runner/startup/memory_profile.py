"""Runs what takes memory beside the KV cache, to see how much: the largest step, some graphs.

It decides nothing: `memory` makes a number of blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..graphs.capture import GraphPool, paused_garbage_collector
from ..graphs.manager import CudaGraphManager
from ..step.target import Target
from ..step.token_graphs import ChoiceGraphs


@dataclass(frozen=True)
class MemoryProfile:
    """The parts of a step, over as little KV as they work with."""

    small_target: Callable[[], Target]
    max_num_tokens: int
    max_logits_rows: int
    pool: GraphPool | None  # None: there are no graphs
    graphs: CudaGraphManager | None  # of the target
    choices_of: Callable[[Target], ChoiceGraphs | None]
    draft_graph_bytes: Callable[[Target], int]

    def run_largest_step(self) -> None:
        """What takes most at once."""
        logits = self.small_target().warm_up(self.max_num_tokens)
        rows = self.max_logits_rows
        logits[:1].float().expand(rows, -1).softmax(-1).cumsum(-1)  # as the sampler's copies

    def graph_bytes(self) -> int:
        """Bytes that all captures will take; leaves nothing captured."""
        if self.graphs is None or self.pool is None:
            return 0
        with self.pool.throw_away(), paused_garbage_collector(collect=False):
            target = self.small_target()
            total = self.graphs.profile_memory(target.create_forward_fn)
            if (choices := self.choices_of(target)) is not None:
                total += choices.profile_memory()
            return total + self.draft_graph_bytes(target)
