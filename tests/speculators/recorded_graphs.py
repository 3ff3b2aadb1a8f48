"""Engines on the CPU whose target and drafter run inside recorded graphs, as on a GPU.

The attention back end reads only persistent buffers, which `build` writes in place: metadata that
is not rebuilt before a replay is stale, as it would be on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.linear.experts import ExpertWeights
from slipstream.kernels.linear.moe import gated
from slipstream.runner.attention.base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.graphs import settings
from slipstream.runner.graphs.manager import CudaGraphManager
from slipstream.runner.models import moe
from slipstream.runner.startup import assembly as startup

from ..runner.graphs.recorder import RecordedGraphs
from .tiny_engine import TinyEngine


class TensorMetadata(AttentionMetadata):
    """Attention in tensor operations of fixed shapes, so that it can be recorded."""

    def __init__(self, starts: Tensor, lens: Tensor, table: Tensor, slots: Tensor) -> None:
        self.starts, self.lens, self.table, self.slots = starts, lens, table, slots

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Any, value: Any, kv_cache: Tensor
    ) -> Tensor:
        if key is not None:
            self._store(layer, key, value, kv_cache)
        tokens = query.shape[0]
        row = torch.searchsorted(self.starts[1:], torch.arange(tokens).int(), right=True)
        row = row.clamp(max=self.lens.shape[0] - 1)
        position = self.lens[row] - (self.starts[1:][row] - torch.arange(tokens))  # [M]
        pages = self.table[row]  # [M, max_blocks]
        if layer.is_mla:
            keys = kv_cache[pages].flatten(1, 2)
            values = keys[..., : layer.head_dim_v]
        else:
            keys, values = (half[pages].flatten(1, 2) for half in kv_cache)
        heads = layer.num_heads // layer.num_kv_heads
        keys, values = (t.repeat_interleave(heads, dim=2) for t in (keys, values))
        at = torch.arange(keys.shape[1])
        seen = at <= position[:, None]
        if layer.sliding_window is not None:
            seen = seen & (at > position[:, None] - layer.sliding_window)
        scores = torch.einsum("mhd,mkhd->mhk", query, keys) * layer.scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("mhk,mkhd->mhd", weights, values)

    def _store(self, layer: AttentionLayer, key: Tensor, value: Any, kv_cache: Tensor) -> None:
        slots = self.slots[: key.shape[0]]
        written, at = (slots >= 0)[:, None, None], slots.clamp(min=0)
        halves = [(kv_cache, key)] if layer.is_mla else zip(kv_cache, (key, value), strict=True)
        for cache, new in halves:
            rows = cache.view(-1, *cache.shape[2:])
            rows[at] = torch.where(written, new, rows[at])  # slot 0 is in the null block


def run_all_experts(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, *_: bool
) -> Tensor:
    """`run_experts` and `expert_parts` of `kernels.linear.moe` without a loop over counts, which a
    graph could not hold."""
    assert experts.gate_up_bias is None and experts.down_bias is None
    weights, ids = torch.where(ids < 0, 0.0, weights), ids.clamp(min=0)  # absent experts
    inner = gated(torch.einsum("th,tkih->tki", x, experts.gate_up[ids]), experts)
    out = torch.einsum("tki,tkhi->tkh", inner, experts.down[ids])
    return (out * weights[..., None]).sum(1)


class TensorBuilder(AttentionBuilder):
    """Owns the buffers; `num_builds` counts the builds."""

    supports = AttentionCGSupport.ALWAYS
    builds_on_device = True

    def __init__(self, max_reqs: int, max_tokens: int, max_blocks: int) -> None:
        self.starts = torch.zeros(max_reqs + 1, dtype=torch.int32)
        self.lens = torch.zeros(max_reqs, dtype=torch.int32)
        self.table = torch.zeros(max_reqs, max_blocks, dtype=torch.int32)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64)
        self.num_builds = 0

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> TensorMetadata:
        self.num_builds += 1
        rows, tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu.tolist()
        assert starts == common.query_start_loc.tolist(), "host and device disagree"
        assert starts == sorted(starts), "query_start_loc decreases"
        assert common.block_table.shape[0] == common.seq_lens.shape[0] == len(starts) - 1
        own = (self.starts[: rows + 1], self.lens[:rows], self.table[:rows], self.slots[:tokens])
        theirs = (common.query_start_loc, common.seq_lens, common.block_table, common.slot_mapping)
        for mine, given in zip(own, theirs, strict=True):
            mine.copy_(given)
        return TensorMetadata(*own)


def tensor_sizes(sizes: BuilderSizes) -> tuple[int, int, int]:
    """The sizes of a `TensorBuilder`: requests, tokens, and blocks of a request."""
    blocks = -(-sizes.max_model_len // sizes.block_size)
    return sizes.max_num_reqs, sizes.max_num_tokens, blocks


class TensorBackend(AttentionBackend):
    """Runs any layer, in any graph."""

    name = "tensor"

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        return None

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> TensorBuilder:
        return TensorBuilder(*tensor_sizes(sizes))


class GraphEngine(TinyEngine):
    """`replays` counts the replays of each manager by name; `backend` holds the graphs."""

    replays: dict[str, int]
    backend: RecordedGraphs
    num_proposals = 0

    @property
    def speculator(self) -> Any:
        """The drafter."""
        return self.engine._runner.speculator

    @property
    def draft_graphs(self) -> Any:
        """The drafter's graphs."""
        return self.engine._runner._draft_graphs  # type: ignore[attr-defined]

    @property
    def table(self) -> Any:
        """The request table."""
        return self.engine._runner.table  # type: ignore[attr-defined]


@contextmanager
def recording(
    lengths: Sequence[int],
    graphs: bool = True,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
    loop: bool = True,
    claims: bool = False,
    backend: AttentionBackend | None = None,
    sizes: Sequence[int] | None = None,
) -> Iterator[tuple[RecordedGraphs, dict[str, int]]]:
    """A context in which engines are built with recorded graphs; see `graph_engine`.

    `lengths` are the query lengths of uniform batches. Yields the graphs and the replays of each
    manager by name.
    """
    replays: dict[str, int] = {}
    replay = CudaGraphManager.run_fullgraph

    def counted(self: CudaGraphManager, desc: Any, eager: Any = None) -> None:
        name = "draft loop" if self.name.startswith("draft decodes") else self.name
        replays[name] = replays.get(name, 0) + 1
        replay(self, desc, eager)

    recorder, attention = RecordedGraphs(), backend or TensorBackend()
    captured = tuple(sizes or sorted({n * length for n in (2, 4) for length in lengths}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "choose_backend", lambda *args: attention)
        patch.setattr(TensorBuilder, "builds_on_device", loop)
        if not claims:
            patch.setattr(startup.ClaimsAtStart, "verify", lambda *args: None)
        for name in ("run_experts", "expert_parts"):
            patch.setattr(moe, name, run_all_experts)
        patch.setattr(CudaGraphManager, "run_fullgraph", counted)
        if graphs:
            patch.setattr(startup, "CudaGraphs", lambda device: recorder)
            patch.setattr(startup, "wanted_mode", lambda *args: mode)
            patch.setattr(settings, "capture_sizes", lambda *args: captured)
            patch.setattr(settings, "mixed_capture_sizes", lambda *args: captured)
        yield recorder, replays


def behave_as_on_a_gpu(engine: Any) -> None:
    """Let the host never look at drafts, so that batches stay uniform."""
    engine._scheduler._limits = replace(engine._scheduler._limits, uniform_drafts=True)
    engine._runner._on_cpu = False


@contextmanager
def graph_engine(
    model: Path,
    speculative: SpeculativeConfig,
    graphs: bool = True,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
    loop: bool = True,
    claims: bool = False,
    backend: AttentionBackend | None = None,
    sizes: Sequence[int] | None = None,
    **changes: Any,
) -> Iterator[GraphEngine]:
    """An engine with recorded graphs, or (`graphs=False`) an eager one with the same attention.

    With `loop` the draft decodes of a step are one graph. With `claims` the back end's claims are
    tested. `backend` replaces `TensorBackend`. `sizes` are captured; by default those of 2 and 4
    requests.
    """
    lengths = (1, 1 + speculative.num_speculative_tokens)
    context = recording(lengths, graphs, mode, loop, claims, backend, sizes)
    with context as (recorder, replays), pytest.MonkeyPatch.context() as patch:
        changes["scheduler"] = {"max_num_seqs": 4} | changes.pop("scheduler", {})
        engine = GraphEngine(model, speculative, **changes)
        engine.replays, engine.backend = replays, recorder
        behave_as_on_a_gpu(engine.engine)
        propose = DraftGraphs.propose

        def counted_proposal(self: Any, *args: Any) -> None:
            engine.num_proposals += 1
            propose(self, *args)

        patch.setattr(DraftGraphs, "propose", counted_proposal)
        try:
            yield engine
        finally:
            engine.close()
