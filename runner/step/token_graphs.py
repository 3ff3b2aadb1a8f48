"""Graphs that end a step: select or verify tokens, commit them to the table, pack the results.

They run after the target's graph of a uniform batch. One kind serves requests that are greedy or
draw by a key, if nothing else reads their logits. The other serves steps of few rows that verify
drafts against the target's distribution. Other steps select their tokens without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...configs.graphs import BatchExecutionDescriptor, StepMode
from ...kernels.batch.padded_step import commit_step
from ...kernels.linear.head_sample import Draws, pick_rows
from ..batch.host_copy import CopyStream
from ..batch.input_batch import InputBatch, InputBuffers
from ..batch.request_table import RequestTable
from ..batch.sampling_state import Feature
from ..batch.step_output import PackedTensors, RowLayout, StepHandle
from ..graphs.manager import CaptureReport, CreateForwardFn, CudaGraphManager
from ..graphs.settings import GraphSettings
from ..sampling.logits_processing import SamplingRows
from ..sampling.row_sampling import RowSampling
from ..sampling.sampler import SamplerOutput, SamplingPath
from .target import Target

# With more rows the device is busy for longer than launches take, and the logits need much memory.
MAX_REJECTION_ROWS = 256
# The features that each kind of graph supports; the device decides which row uses which.
_DRAWN = Feature.GREEDY | Feature.RANDOM | Feature.SEEDED
_REJECTED = _DRAWN | Feature.UNSEEDED

# (logits rows, their hidden states [L*, H]) -> emitted tokens
Select = Callable[[SamplingRows, Tensor], SamplerOutput]


class _NoAttention:
    """Takes the place of an attention state for graphs without attention."""

    metadata: tuple[Any, ...] = ()


class TokenGraphs:
    """The graphs and the buffers of their results, which are indexed by batch row."""

    def __init__(
        self,
        drawing: CudaGraphManager,
        rejecting: CudaGraphManager,  # for batches that need rejection sampling
        target: Target,
        sampling: RowSampling,
        table: RequestTable,
        buffers: InputBuffers,
    ) -> None:
        self._drawing, self._rejecting = drawing, rejecting
        self._target, self._sampling = target, sampling
        self._table, self._buffers = table, buffers
        reqs, width = table.max_num_reqs, table.num_speculative_tokens + 4
        self._packed = torch.zeros((reqs, width), dtype=torch.int64, device=table.device)
        # [2, R] int32, num_sampled and num_rejected by batch row; 0 in padded rows
        self.counts = torch.zeros((2, reqs), dtype=torch.int32, device=table.device)
        # Number of rows -> views of the results that `run` returns.
        self._views: dict[int, tuple[PackedTensors, Tensor, Tensor]] = {}
        self._copied: torch.cuda.Event | None = None  # the last results were copied to the host
        self._by_path = {SamplingPath.DRAW: drawing, SamplingPath.REJECT: rejecting}

    # --- capture --------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all graphs; the target's must have been captured before."""
        self._drawing.capture(self._creator(self._draw))
        self._rejecting.capture(self._creator(self._reject))

    def profile_memory(self) -> int:
        """Estimate the bytes that `capture` will need; leaves nothing captured."""
        drawing = self._drawing.profile_memory(self._creator(self._draw))
        return drawing + self._rejecting.profile_memory(self._creator(self._reject))

    @property
    def capture_reports(self) -> list[CaptureReport]:
        return [self._drawing.report, self._rejecting.report]

    def _creator(self, select: Select) -> CreateForwardFn:
        def create(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> tuple[Callable[[Any], None], Any]:
            self._buffers.fill_dummy(desc)  # rows of no request, so nothing is committed
            return lambda _: self._select(desc, select), _NoAttention()

        return create

    def _draw(self, rows: SamplingRows, hidden: Tensor) -> SamplerOutput:
        sampler = self._sampling.sampler
        return sampler.draw(self._picker(hidden), rows, self._table, _DRAWN)

    def _reject(self, rows: SamplingRows, hidden: Tensor) -> SamplerOutput:
        vocab_size = self._table.sampling.vocab_size
        logits = self._target.compute_logits(hidden)[:, :vocab_size]
        pick = partial(pick_rows, logits)
        return self._sampling.sampler.draw(pick, rows, self._table, _REJECTED, logits)

    def _select(self, desc: BatchExecutionDescriptor, select: Select) -> None:
        """Select tokens and commit them; from the host it uses N* and L* only."""
        assert desc.num_reqs is not None
        reqs, rows, buffers = desc.num_reqs, desc.num_tokens, self._buffers
        sampled = select(
            SamplingRows(
                slots=[],
                idx_mapping=buffers.idx_mapping[:reqs],
                cu_num_logits=buffers.cu_num_logits[: reqs + 1],
                cu_num_logits_cpu=[],
                expanded_idx_mapping=buffers.expanded_idx_mapping[:rows],
                expanded_local_pos=buffers.expanded_local_pos[:rows],
                positions=buffers.logits_positions[:rows],
                draft_ids=buffers.draft_ids[:rows],
                seq_lens=buffers.seq_lens[:reqs],
                max_num_drafts=self._table.num_speculative_tokens,
            ),
            self._target.outputs(desc)[0],
        )
        commit_step(self._table, buffers, sampled, self._packed, self.counts)

    def _picker(self, hidden: Tensor) -> Callable[[Draws | None], tuple[Tensor, Tensor]]:
        """A function that picks tokens of these rows, without writing logits if the model can."""
        vocab_size, target = self._table.sampling.vocab_size, self._target
        pick = target.pick_tokens
        if pick is not None:
            return lambda draws: pick(hidden, vocab_size, draws)
        return lambda draws: pick_rows(target.compute_logits(hidden)[:, :vocab_size], draws)

    # --- a step -----------------------------------------------------------------------------------

    def find(self, batch: InputBatch) -> CudaGraphManager | None:
        """The graphs that can sample this batch of a WHOLE step; None if it needs the general path.

        Every token row must have a logits row, so no row ends a prompt of several tokens.
        """
        if batch.num_logits != batch.num_tokens:
            return None
        graphs = self._by_path.get(self._sampling.path(batch, self._table))
        return graphs if graphs is not None and graphs.holds(batch.descriptor) else None

    def run(
        self,
        graphs: CudaGraphManager,  # from `find`
        batch: InputBatch,
        handle: StepHandle,
        stream: CopyStream | None,
    ) -> tuple[Tensor, Tensor]:
        """Replay the graph of the batch, and start copying its results to the host on `stream`.

        Publishes the results in `handle`. Returns views of `counts`, which the next `run`
        overwrites: num_sampled and num_rejected, [N] int32 each.
        """
        if self._copied is not None and stream is not None:  # usually it has finished long ago
            stream.main.wait_event(self._copied)
        graphs.run_fullgraph(batch.descriptor)
        rows = batch.num_reqs
        if rows not in self._views:
            self._views[rows] = (PackedTensors(self._packed[:rows]), *self.counts[:, :rows])
        results, num_sampled, num_rejected = self._views[rows]
        copy = handle.publish(results, RowLayout([None] * rows), stream)
        self._copied = copy.event
        return num_sampled, num_rejected


def create_token_graphs(
    settings: GraphSettings | None,
    graphs: CudaGraphManager | None,
    target: Target,
    sampling: RowSampling,
    table: RequestTable,
    buffers: InputBuffers,
) -> TokenGraphs | None:
    """Prepare the graphs that end WHOLE steps; `TokenGraphs.capture` captures them.

    There is one for each of the target's `graphs` whose step is WHOLE and whose rows' logits fit
    in memory at once. Returns None if there is none, or without `settings` or `graphs`.
    """
    if settings is None or graphs is None:
        return None
    wanted = [
        desc
        for desc in graphs.wanted
        if target.step_mode(desc) is StepMode.WHOLE and desc.num_tokens <= sampling.max_rows
    ]
    if not wanted:
        return None
    verified = [
        desc
        for desc in wanted
        if desc.uniform_token_count != 1 and desc.num_tokens <= MAX_REJECTION_ROWS
    ]
    drawing, rejecting = (
        CudaGraphManager(name, descs, settings.pool, settings.progress)
        for name, descs in (("token selection", wanted), ("draft rejection", verified))
    )
    return TokenGraphs(drawing, rejecting, target, sampling, table, buffers)
