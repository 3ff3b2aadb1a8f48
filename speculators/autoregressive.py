"""Drafters that feed their output back: one pass over the target's rows, then one-token decodes.

The pass over the target's rows (*draft prefill*) keeps rejected rows in the batch, since leaving
them out would wait for the device; what they write is overwritten before anything reads it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ..configs.schema import SpeculativeConfig
from ..kernels.drafts.prepare_draft import advance_draft_decode
from ..kernels.drafts.stage_drafts import stage_draft_rows
from .base import DraftHost, DraftInputs, DraftModelSpeculator, GraphManager, SpeculatorNeeds
from .deferred import DeferredTokens


class _LoopState:
    """Stands for the attention state of a graph that makes its own; has no metadata to share."""

    metadata: tuple[Any, ...] = ()


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """Draft prefill and K - 1 draft decodes; K is up to `num_drafts`, by step.

    The model offers `input_width`, `feedback_width`, `combine(target_hidden [M, input_width]) ->
    [M, feedback_width]`, `forward(ids, positions, hidden, attention)` and `compute_logits`; with
    `selects_rows` forward also takes the rows that are wanted, the only ones that it returns, and
    with `writes_feedback` besides where to write what is fed back.
    """

    advance_draft_positions = True  # each draft's KV goes one position on (False: Gemma 4)
    decodes_write_kv = True  # False: they only read (Gemma 4)
    runs_draft_prefill = True  # False: nothing is run over the target's rows (Gemma 4)
    first_pass_drafts = True  # False: the first draft, too, comes from a decode
    reads_hidden = True  # False: the first pass reads ids only, not shifted (a whole model)

    def __init__(self, config: SpeculativeConfig, host: DraftHost) -> None:
        super().__init__(config, host)
        reqs, tokens = host.max_num_reqs, host.max_num_tokens
        wide, narrow = int(self.model.input_width), int(self.model.feedback_width)
        self.target_hidden = torch.zeros(
            tokens, wide, dtype=host.dtype, device=host.device
        )  # [T, .]
        self.hidden = torch.zeros(reqs, narrow, dtype=host.dtype, device=host.device)  # [R, .]
        self._prefill_graphs: GraphManager | None = None
        self._decode_graphs: GraphManager | None = None
        self._loop_graphs: dict[int, GraphManager] = {}  # by number of decodes, ascending
        self._prefill_captured: Mapping[BatchExecutionDescriptor, Any] = {}
        self.deferred: DeferredTokens | None = None
        if self.runs_draft_prefill:
            self.deferred = DeferredTokens(host, wide, self.reads_hidden, int(self.reads_hidden))
        self.needs = self.describe_needs()

    @property
    @abstractmethod
    def model_returns_tuple(self) -> bool:
        """True: forward gives (hidden for logits, hidden fed back); False: one tensor for both."""

    def describe_needs(self) -> SpeculatorNeeds:
        """What the runner must provide; K lookahead slots hold the drafts' KV."""
        return SpeculatorNeeds(
            num_speculative_tokens=self.num_drafts,
            num_lookahead_tokens=self.num_drafts,
            hidden_states=True,
            draft_logits=self.probabilistic,
            max_deferred_tokens=0 if self.deferred is None else self.deferred.capacity,
            kv_needs_next_token=True,
        )

    # --- graphs -----------------------------------------------------------------------------------

    def init_cudagraph_manager(self, mode: CUDAGraphMode) -> None:
        """Draft prefill takes the target's descriptors; decodes are FULL_DECODE_ONLY or NONE."""
        if mode is CUDAGraphMode.NONE:
            return
        full = mode.decode_mode() is CUDAGraphMode.FULL
        decode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        prefill = mode.without_pieces()  # each graph follows one of the target's
        lengths = sorted({1, *(count + 1 for count in self.config.draft_counts)})
        if self.runs_draft_prefill:
            self._prefill_graphs = self.host.create_graph_manager("draft prefill", prefill, lengths)
        if not full or not self.host.draft_decodes_on_device:
            self._decode_graphs = self.host.create_graph_manager("draft decode", decode, [1])
            return
        counts = sorted({self._num_decodes(n) for n in self.config.draft_counts} - {0})
        self._loop_graphs = {
            count: self.host.create_graph_manager(
                "draft decode", decode, [1], f"draft decodes x {count}", count < counts[-1]
            )
            for count in counts
        }

    def _num_decodes(self, num_drafts: int) -> int:
        """How many decodes make so many drafts."""
        return max(0, num_drafts - 1) if self.first_pass_drafts else num_drafts

    def capture(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> None:
        """Capture draft prefill with the target's pairs, then draft decodes with fresh states."""
        if self._prefill_graphs is not None:
            create = self._prefill_creator(attention_states)
            self._prefill_captured = self._prefill_graphs.capture(create)
        if self._decode_graphs is not None:
            self._decode_graphs.capture(self._create_decode)
        for count, graphs in self._loop_graphs.items():
            graphs.capture(self._loop_creator(count))

    def profile_graph_memory(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> int:
        """Bytes that `capture` will take; leaves nothing captured."""
        total = 0
        if self._prefill_graphs is not None:
            total += self._prefill_graphs.profile_memory(self._prefill_creator(attention_states))
        if self._decode_graphs is not None:
            total += self._decode_graphs.profile_memory(self._create_decode)
        for count, graphs in self._loop_graphs.items():
            total += graphs.profile_memory(self._loop_creator(count))
        return total

    def _prefill_creator(self, attention_states: Mapping[BatchExecutionDescriptor, Any]) -> Any:
        def create_prefill(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> tuple[Callable[[Any], None], Any]:
            pair = attention_states[desc]
            rows = desc.num_reqs or 1

            def prefill(attention: Any) -> None:
                hidden: Tensor | None = None
                if self._steps is not None and desc.uniform_token_count is not None:
                    inputs = self._steps.inputs(desc)
                    self._stage(inputs)
                    if self.reads_hidden:
                        hidden = self.select_target_hidden(inputs)  # it stays where it is
                self._prefill_forward(desc.num_tokens, rows, attention, hidden)
                if self._ends_with_prefill:
                    self._keep(rows, 1)

            state = pair.warmup if warmup else pair.captured
            self._fill_rows(rows)
            return prefill, state

        return create_prefill

    @property
    def _ends_with_prefill(self) -> bool:
        """Whether the graphs of draft prefills keep its draft, since some step makes no other."""
        return self.first_pass_drafts and 1 in self.config.draft_counts

    def takes_in(self, descriptor: BatchExecutionDescriptor) -> bool:
        """Uniform ones whose draft prefill is captured."""
        is_uniform = descriptor.uniform_token_count is not None
        return self._steps is not None and is_uniform and descriptor in self._prefill_captured

    def _create_decode(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> tuple[Callable[[Any], None], Any]:
        rows = desc.num_reqs or desc.num_tokens
        self._fill_rows(rows)
        attention = self._decode_attention(rows, rows, desc, for_capture=True)
        return lambda attention: self._decode_forward(rows, attention), attention

    def _loop_creator(self, num_decodes: int) -> Any:
        def create_loop(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> tuple[Callable[[Any], None], Any]:
            rows = desc.num_reqs or desc.num_tokens
            self._fill_rows(rows)
            build = self.host.attention_on_device(
                self.query_start_loc[: rows + 1],
                self.seq_lens[:rows],
                self.write_positions[:rows],
                desc,
                self.decodes_write_kv,
            )
            # The attention state of each decode is made inside the graph, like its positions.
            return lambda _: self._loop_forward(rows, num_decodes, build), _LoopState()

        return create_loop

    def _loop_forward(self, rows: int, num_decodes: int, build: Callable[[], Any]) -> None:
        """All decodes of a proposal, the plain version's operations in its order."""
        self.host.stage_draft_tables(rows, rows, self.idx_mapping[:rows])
        attention: Any = None
        for _ in range(num_decodes):
            if self.advance_draft_positions:
                self._advance()
            if attention is None or self.advance_draft_positions:
                attention = build()
            self._decode_forward(rows, attention)
        self._keep(rows, num_decodes + (1 if self.first_pass_drafts else 0))

    # --- one proposal -----------------------------------------------------------------------------

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Draft K tokens for every row; [N, K] int64."""
        count = self.num_drafts if inputs.num_drafts is None else inputs.num_drafts
        if self.deferred is not None:
            self.deferred.catch_up(inputs, self.model, self.max_position)
        if not (inputs.in_buffers and self.takes_in(inputs.descriptor)):
            self._stage(inputs)
            hidden = self.select_target_hidden(inputs)
            self.target_hidden[: hidden.shape[0]] = hidden
        kept = self._passes(
            inputs.descriptor, inputs.attention, inputs.num_tokens, inputs.num_reqs,
            inputs.num_decode_reqs, count,
        )  # fmt: skip
        if not kept:
            self._keep(inputs.num_reqs, count)
        return self._result(inputs, count)

    def run_dummy(
        self,
        descriptor: BatchExecutionDescriptor,
        attention: Any,
        num_decode_reqs: int,
        num_drafts: int,
    ) -> None:
        """The passes of a proposal, for no request."""
        self._fill_rows(0)
        tokens = descriptor.num_tokens
        self._passes(descriptor, attention, tokens, 0, num_decode_reqs, num_drafts)

    def graph_managers(self) -> Sequence[GraphManager]:
        """Of draft prefills and decodes."""
        all_of_them = (self._prefill_graphs, self._decode_graphs, *self._loop_graphs.values())
        return [graphs for graphs in all_of_them if graphs is not None]

    def _passes(
        self,
        desc: BatchExecutionDescriptor,
        attention: Any,
        num_tokens: int,
        num_reqs: int,
        num_decode_reqs: int,
        num_drafts: int,
    ) -> bool:
        """The passes of a proposal over what the buffers hold; True if a graph kept the drafts."""
        replayed = self.runs_draft_prefill and self._first_pass(
            desc, attention, num_tokens, num_reqs
        )
        decodes, padded = self._num_decodes(num_drafts), max(num_reqs, num_decode_reqs)
        if decodes == 0:
            return replayed and self._ends_with_prefill
        if self._replay_loop(padded, decodes):
            return True
        decode_attention: Any = None
        for _ in range(decodes):
            decode_attention = self._decode(num_reqs, padded, decode_attention)
        return False

    def _replay_loop(self, padded: int, num_decodes: int) -> bool:
        """All decodes as one graph, if there is one that makes at least so many."""
        longer = next((count for count in self._loop_graphs if count >= num_decodes), None)
        if longer is None:
            return False
        graphs = self._loop_graphs[longer]
        desc = graphs.dispatch(padded, padded, 1)
        if desc.mode is not CUDAGraphMode.FULL:
            return False
        graphs.run_fullgraph(desc)
        return True

    def defer(self, inputs: DraftInputs) -> None:
        """Keep the step's hidden states for the pass that a later `propose` begins with."""
        if self.deferred is not None:
            self.deferred.keep(inputs, self.select_target_hidden(inputs))

    def _stage(self, inputs: DraftInputs) -> None:
        """Copy and shift the target's step into the drafter's buffers, padded rows included; all
        but its hidden states."""
        tokens = inputs.descriptor.num_tokens
        stage_draft_rows(inputs, inputs.requests, self, inputs.num_reqs, tokens, self.max_position)

    def _fill_rows(self, rows: int) -> None:
        """Valid dummy rows for warm-up and capture."""
        torch.arange(self.host.max_num_reqs + 1, dtype=torch.int32, out=self.query_start_loc)
        self.query_start_loc.clamp_(max=rows)
        self.idx_mapping.fill_(-1)
        self.decode_positions.zero_()
        self.write_positions.fill_(-1)
        self.seq_lens.zero_()
        self.seq_lens[:rows] = 1
        for buffer in (self.step, self.last_token_indices, self.input_ids, self.positions):
            buffer.zero_()

    def select_target_hidden(self, inputs: DraftInputs) -> Tensor:
        """The target's hidden states that the first pass reads, [M*, input_width]."""
        assert inputs.hidden_states is not None
        return inputs.hidden_states

    def _first_pass(
        self, desc: BatchExecutionDescriptor, attention: Any, num_tokens: int, num_reqs: int
    ) -> bool:
        """The pass over the target's rows; True if it was a replay."""
        captured = desc in self._prefill_captured and self._prefill_graphs is not None
        if captured and (attention is None or attention.can_replay):
            assert self._prefill_graphs is not None
            self._prefill_graphs.run_fullgraph(desc)
            return True
        # PIECEWISE attention has the real rows only.
        full = desc.mode is not CUDAGraphMode.PIECEWISE
        rows = max(1, num_reqs)  # a dummy step has none
        self._prefill_forward(desc.num_tokens if full else num_tokens, rows, attention)
        return False

    def _prefill_forward(
        self, num_tokens: int, num_rows: int, attention: Any, target_hidden: Tensor | None = None
    ) -> None:
        """The pass over the target's token rows; makes draft 0 and the first fed-back hidden.

        `target_hidden` [num_tokens, input_width]: in place of what the buffer holds.
        """
        if target_hidden is None:
            target_hidden = self.target_hidden[:num_tokens]
        hidden = self.model.combine(target_hidden)
        last = self.last_token_indices[:num_rows]
        given = (self.input_ids[:num_tokens], self.positions[:num_tokens], hidden, attention)
        # All rows' KV is wanted, but the last row's draft only.
        if getattr(self.model, "selects_rows", False):
            self._emit(*self._run_model(num_rows, *given, last))
        else:
            out = self.model(*given)
            for_logits, feedback = out if self.model_returns_tuple else (out, out)
            self._emit(for_logits[last], feedback[last])

    def _run_model(self, rows: int, *given: Any) -> tuple[Tensor, Tensor | None]:
        """(hidden for logits, hidden to feed back; None: the model has written it), [rows, .]"""
        if getattr(self.model, "writes_feedback", False):
            out = self.model(*given, feedback=self.hidden[:rows])
            return (out[0] if self.model_returns_tuple else out), None
        out = self.model(*given)
        return out if self.model_returns_tuple else (out, out)

    def _decode(self, num_reqs: int, padded: int, attention: Any) -> Any:
        """One more draft per request; returns the attention state, for constant positions.

        `padded`: the most requests that any rank has.
        """
        if self.advance_draft_positions:
            self._advance()
        desc = None
        if self._decode_graphs is not None:
            desc = self._decode_graphs.dispatch(padded, padded, 1)
            if desc.mode is not CUDAGraphMode.FULL:
                desc = None
        rows = max(1, num_reqs) if desc is None else desc.num_tokens
        if attention is None or self.advance_draft_positions:
            # Rebuilt before every decode whose positions advanced: see spec on stale metadata.
            attention = self._decode_attention(num_reqs, rows, desc)
        if desc is None or self._decode_graphs is None or not attention.can_replay:
            self._decode_forward(rows, attention)
        else:
            self._decode_graphs.run_fullgraph(desc)
        return attention

    def _advance(self) -> None:
        advance_draft_decode(
            self.decode_positions, self.seq_lens, self.max_position, self.write_positions
        )

    def _decode_attention(
        self,
        num_reqs: int,
        rows: int,
        desc: BatchExecutionDescriptor | None,
        for_capture: bool = False,
    ) -> Any:
        return self.host.build_draft_attention(
            num_reqs,
            self.query_start_loc[: rows + 1],
            self.seq_lens[:rows],
            self.write_positions[:rows],
            self.idx_mapping[:rows],
            desc,
            for_capture,
            self.decodes_write_kv,
        )

    def _decode_forward(self, rows: int, attention: Any) -> None:
        """One token per request; reads and writes the buffers, so that it can be recorded."""
        given = (self.decode_ids[:rows], self.decode_positions[:rows], self.hidden[:rows])
        self._emit(*self._run_model(rows, *given, attention))

    def _emit(self, for_logits: Tensor, feedback: Tensor | None) -> None:
        """Draw a draft per row, keep it, and make it the next decode's input; [N*, ...] each, with
        what is fed back, unless it is in its place."""
        self.draw_drafts(for_logits)
        if feedback is not None:
            self.hidden[: for_logits.shape[0]] = feedback
