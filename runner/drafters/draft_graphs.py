"""Runs the passes of an autoregressive drafter, from CUDA graphs where there are any.

It owns the drafter's graphs and the loop over a proposal's passes; the speculator defines what each
pass computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode, StepMode
from ...configs.speculative import MAX_DRAFTS
from ...speculators.autoregressive import AutoRegressiveSpeculator
from ...speculators.base import DraftInputs, RequestRows
from ..graphs.dispatch import descriptors, resolve_draft_decode, thinned
from ..graphs.manager import CreateForwardFn, CudaGraphManager
from ..graphs.settings import GraphSettings
from ..parallel.experts import RowExchange
from .attention import DraftAttention

logger = logging.getLogger(__name__)

# Descriptor -> the step that a graph reads from the step buffers: all rows of the descriptor,
# padded ones with slot -1. None if steps of this descriptor are not WHOLE.
WholeStep = Callable[[BatchExecutionDescriptor], DraftInputs | None]
StatePairs = Mapping[BatchExecutionDescriptor, Any]  # the target's `AttentionStatePair`s


class _NoAttention:
    """Takes the place of an attention state for graphs that build their own."""

    metadata: tuple[Any, ...] = ()


class DraftGraphs:
    """The graph managers of one drafter, and its passes.

    Draft prefills have the descriptors of the target's FULL graphs, and share their attention. If
    attention can be built on the device, one graph holds all draft decodes of a step, else one
    each.
    """

    def __init__(
        self,
        speculator: AutoRegressiveSpeculator,
        attention: DraftAttention,
        requests: RequestRows,
        settings: GraphSettings | None = None,  # None: this device has no graphs
        of_target: Sequence[BatchExecutionDescriptor] = (),  # of the target's graphs
        mode: CUDAGraphMode = CUDAGraphMode.NONE,  # of the target
        exchange: RowExchange | None = None,  # of the engines that share experts
    ) -> None:
        speculator.use_requests(requests)
        self._exchange = exchange
        self.speculator = speculator
        self.attention = attention
        host = speculator.host
        self._most_drafts = torch.full(
            (host.max_num_reqs,), MAX_DRAFTS, dtype=torch.int32, device=host.device
        )  # [R] by batch row
        self._most_drafts_cpu: int | list[int] = MAX_DRAFTS  # for all rows, or by row
        # The graphs of draft prefills store their draft if some steps make no other.
        self._prefill_stores = speculator.first_pass_drafts and 1 in speculator.config.draft_counts
        self._prefills: CudaGraphManager | None = None
        self._decodes: CudaGraphManager | None = None  # a graph for each decode
        self._loops: dict[int, CudaGraphManager] = {}  # by number of decodes, ascending
        if settings is not None and mode is not CUDAGraphMode.NONE:
            self._create_managers(settings, of_target, mode)

    def _create_managers(
        self,
        settings: GraphSettings,
        of_target: Sequence[BatchExecutionDescriptor],
        mode: CUDAGraphMode,
    ) -> None:
        speculator, host = self.speculator, self.speculator.host
        if speculator.runs_draft_prefill:
            prefills = [desc for desc in of_target if desc.mode is CUDAGraphMode.FULL]
            self._prefills = settings.manager("draft prefill", prefills)
        full = mode.decode_mode() is CUDAGraphMode.FULL
        wanted = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        decision = resolve_draft_decode(wanted, self.attention.support)
        if decision.reason:
            logger.warning("draft decode graphs run as %s: %s", decision.mode.name, decision.reason)
        sizes = (settings.sizes, host.max_num_reqs, host.max_num_tokens)
        decodes = descriptors(decision.mode, decision.uniform_token_counts, *sizes)
        if not (full and settings.draft_loop and self.attention.builds_on_device):
            self._decodes = settings.manager("draft decode", decodes)
            return
        few = sorted(thinned(decodes[::-1]), key=lambda desc: -desc.num_tokens)
        counts = sorted({speculator.num_decodes(k) for k in speculator.config.draft_counts} - {0})
        for count in counts:
            descs = decodes if count == counts[-1] else few
            self._loops[count] = settings.manager(f"draft decodes x {count}", descs)

    # --- capture ----------------------------------------------------------------------------------

    @property
    def managers(self) -> list[CudaGraphManager]:
        found = (self._prefills, self._decodes, *self._loops.values())
        return [graphs for graphs in found if graphs is not None]

    def capture(self, pairs: StatePairs, whole_step: WholeStep) -> None:
        """Capture all graphs; those of WHOLE steps read the step and store its drafts."""
        for graphs, create in self._captures(pairs, whole_step):
            graphs.capture(create)

    def profile_memory(self, pairs: StatePairs) -> int:
        """Bytes that `capture` will need; leaves nothing captured."""
        captures = self._captures(pairs, lambda desc: None)
        return sum(graphs.profile_memory(create) for graphs, create in captures)

    def _captures(
        self, pairs: StatePairs, whole_step: WholeStep
    ) -> Iterator[tuple[CudaGraphManager, CreateForwardFn]]:
        if self._prefills is not None:
            yield self._prefills, partial(self._create_prefill, pairs, whole_step)
        self._begin_decodes()
        if self._decodes is not None:
            yield self._decodes, self._create_decode
        for count, graphs in self._loops.items():
            yield graphs, partial(self._create_loop, count)
        self._begin_decodes(False)

    def _begin_decodes(self, are_next: bool = True) -> None:
        if self._exchange is not None:
            self._exchange.begin_decodes(are_next)

    def _create_prefill(
        self,
        pairs: StatePairs,
        whole_step: WholeStep,
        desc: BatchExecutionDescriptor,
        warmup: bool,
    ) -> tuple[Callable[[Any], None], Any]:
        speculator, rows = self.speculator, desc.num_reqs or 1
        inputs = whole_step(desc)

        def prefill(attention: Any) -> None:
            hidden = None
            if inputs is not None:
                speculator.stage(inputs)
                hidden = speculator.select_target_hidden(inputs)  # read where the target wrote it
            speculator.first_pass(desc.num_tokens, rows, attention, hidden)
            if self._prefill_stores:
                speculator.store_drafts(self._most_drafts, rows, 1)

        state = pairs[desc].warmup if warmup else pairs[desc].captured
        speculator.fill_dummy(rows)
        return prefill, state

    def _create_decode(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> tuple[Callable[[Any], None], Any]:
        speculator, rows = self.speculator, desc.num_reqs or desc.num_tokens
        speculator.fill_dummy(rows)
        attention = self.attention.build_for_capture(
            speculator.query_start_loc[: rows + 1], speculator.seq_lens[:rows], desc
        )
        return partial(speculator.decode, rows), attention

    def _create_loop(
        self, num_decodes: int, desc: BatchExecutionDescriptor, warmup: bool
    ) -> tuple[Callable[[Any], None], Any]:
        speculator, rows = self.speculator, desc.num_reqs or desc.num_tokens
        speculator.fill_dummy(rows)
        build = self.attention.on_device(
            speculator.query_start_loc[: rows + 1],
            speculator.seq_lens[:rows],
            speculator.write_positions[:rows],
            desc,
            speculator.advance_draft_positions,
        )

        def loop(_: Any) -> None:
            self.attention.gather_tables(rows, rows, speculator.idx_mapping[:rows])
            attention: Any = None
            for _ in range(num_decodes):
                if speculator.advance_draft_positions:
                    speculator.advance()
                if attention is None or speculator.advance_draft_positions:
                    attention = build()
                speculator.decode(rows, attention)
            num_made = num_decodes + int(speculator.first_pass_drafts)
            speculator.store_drafts(self._most_drafts, rows, num_made)

        return loop, _NoAttention()

    # --- one proposal -----------------------------------------------------------------------------

    def limit(self, most_drafts: int | list[int]) -> None:
        """Set the most drafts that the next proposals store, for all rows or by batch row."""
        if most_drafts == self._most_drafts_cpu:
            return
        self._most_drafts_cpu = most_drafts
        if isinstance(most_drafts, int):
            self._most_drafts.fill_(most_drafts)
        else:
            rows = np.array(most_drafts, dtype=np.int32)
            self.speculator.host.upload(rows, out=self._most_drafts[: len(most_drafts)])

    def propose(self, inputs: DraftInputs) -> None:
        """Draft for every row and store the drafts in the request table. Never waits."""
        speculator = self.speculator
        if speculator.deferred is not None:
            speculator.deferred.catch_up(
                inputs, speculator.model, speculator.max_position, self.attention.build_rows
            )
        count = speculator.num_drafts if inputs.num_drafts is None else inputs.num_drafts
        if not (inputs.mode is StepMode.WHOLE and speculator.runs_draft_prefill):
            speculator.stage(inputs)
            if speculator.runs_draft_prefill:
                speculator.stage_hidden(inputs)
        stored = self._passes(
            inputs.descriptor, inputs.attention, inputs.num_tokens, inputs.num_reqs,
            inputs.num_decode_reqs, count,
        )  # fmt: skip
        if not stored:
            speculator.store_drafts(self._most_drafts, inputs.num_reqs, count)

    def defer(self, inputs: DraftInputs) -> None:
        """Keep the step's hidden states for a later `propose`, which begins with its tokens."""
        if self.speculator.deferred is not None:
            hidden = self.speculator.select_target_hidden(inputs)
            self.speculator.deferred.keep(inputs, hidden)

    def run_dummy(
        self,
        desc: BatchExecutionDescriptor,
        attention: Any,  # the target's state of the same dummy step; None in a WHOLE step
        num_decode_reqs: int,
        num_drafts: int,
    ) -> None:
        """Run the passes of a proposal without requests, since other ranks' passes contain
        collectives.

        In a WHOLE step the graph of the first pass fills the buffers: all of its rows are padding.
        """
        if attention is not None or not self.speculator.runs_draft_prefill:
            self.speculator.fill_dummy(0)
        self._passes(desc, attention, desc.num_tokens, 0, num_decode_reqs, num_drafts)

    def _passes(
        self,
        desc: BatchExecutionDescriptor,
        attention: Any,
        num_tokens: int,
        num_reqs: int,
        num_decode_reqs: int,
        num_drafts: int,
    ) -> bool:
        """Run the passes over what the buffers hold; True if a graph has stored the drafts."""
        speculator = self.speculator
        replayed = speculator.runs_draft_prefill and self._first_pass(
            desc, attention, num_tokens, num_reqs
        )
        decodes, padded = speculator.num_decodes(num_drafts), max(num_reqs, num_decode_reqs)
        if decodes == 0:
            return replayed and self._prefill_stores
        self._begin_decodes()
        if self._replay_loop(padded, decodes):
            return True
        decode_attention: Any = None
        for _ in range(decodes):
            decode_attention = self._decode(num_reqs, padded, decode_attention)
        return False

    def _first_pass(
        self, desc: BatchExecutionDescriptor, attention: Any, num_tokens: int, num_reqs: int
    ) -> bool:
        """Run the pass over the target's rows; True if a graph was replayed."""
        captured = self._prefills is not None and self._prefills.holds(desc)
        if captured and (attention is None or attention.can_replay):
            assert self._prefills is not None
            self._prefills.run_fullgraph(desc)
            return True
        assert attention is not None, "a WHOLE step has a graph for the draft prefill"
        # PIECEWISE attention has the real rows only.
        full = desc.mode is not CUDAGraphMode.PIECEWISE
        rows = max(1, num_reqs)  # a dummy step has none
        self.speculator.first_pass(desc.num_tokens if full else num_tokens, rows, attention)
        return False

    def _replay_loop(self, padded: int, num_decodes: int) -> bool:
        """Replay the smallest loop of at least `num_decodes` decodes; False if there is none."""
        longer = next((count for count in self._loops if count >= num_decodes), None)
        if longer is None:
            return False
        graphs = self._loops[longer]
        desc = graphs.dispatch(padded, padded, 1)
        if desc.mode is not CUDAGraphMode.FULL:
            return False
        graphs.run_fullgraph(desc)
        return True

    def _decode(self, num_reqs: int, padded: int, attention: Any) -> Any:
        """Make one more draft per request.

        `attention` is the result of the last call, which is reused if positions stay. `padded`: the
        most requests of any rank.
        """
        speculator = self.speculator
        if speculator.advance_draft_positions:
            speculator.advance()
        desc = None
        if self._decodes is not None:
            desc = self._decodes.dispatch(padded, padded, 1)
            if desc.mode is not CUDAGraphMode.FULL:
                desc = None
        rows = max(1, num_reqs) if desc is None else desc.num_tokens
        if attention is None or speculator.advance_draft_positions:
            # Metadata of an earlier position would be stale.
            attention = self._decode_attention(num_reqs, rows, desc)
        if desc is None or self._decodes is None or not attention.can_replay:
            speculator.decode(rows, attention)
        else:
            self._decodes.run_fullgraph(desc)
        return attention

    def _decode_attention(
        self, num_reqs: int, rows: int, desc: BatchExecutionDescriptor | None
    ) -> Any:
        speculator = self.speculator
        return self.attention.build(
            num_reqs,
            speculator.query_start_loc[: rows + 1],
            speculator.seq_lens[:rows],
            speculator.write_positions[:rows],
            speculator.idx_mapping[:rows],
            desc,
            speculator.advance_draft_positions,
        )
