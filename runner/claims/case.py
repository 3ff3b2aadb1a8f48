"""Measures how far a back end's graph differs from eager runs, at ragged, growing lengths.

Each trial has one attention layer over a small KV cache. Start-up and the GPU tests use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from ...kernels.attention.compressed.pages import Pages
from ...kernels.attention.compressed.store_rows import store_rows
from ...kernels.attention.store_kv import store_kv
from ...kernels.quant.latent_pages import page_bytes
from ..attention.base import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    AttentionState,
    BuilderSizes,
    CommonAttentionMetadata,
)
from ..graphs.capture import GraphPool
from ..graphs.manager import CudaGraphManager, relative_error
from .claims import ClaimCase

Compare = Callable[[Tensor, Tensor], float]  # (replayed, expected) -> error
# Largest relative error that passes, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class ClaimSetup:
    """The shape of trial batches."""

    max_len: int = 4096
    num_reqs: int = 4  # requests in the graph; smaller batches are padded
    mixed_tokens: int = 64  # token rows of the mixed case
    block_size: int = 16


class ClaimTrial:
    """Holds a trial's buffers, allocated once; `measure` runs one case."""

    def __init__(
        self,
        backend: AttentionBackend,
        layer: AttentionLayer,
        setup: ClaimSetup,
        dtype: torch.dtype,
        device: torch.device,
        pool: GraphPool,
        compare: Compare = relative_error,
    ) -> None:
        self.compare = compare
        self.setup, self.layer, self.dtype, self.device = setup, layer, dtype, device
        self.backend = backend.name
        self.pool = pool
        size, num_reqs = setup.block_size, setup.num_reqs
        self.blocks_per_req = -(-setup.max_len // size)
        num_blocks = 1 + num_reqs * self.blocks_per_req
        self.max_tokens = max(setup.mixed_tokens, num_reqs * 16)
        sizes = BuilderSizes(size, num_reqs, self.max_tokens, setup.max_len, dtype, device)
        self.builder = backend.create_builder([layer], sizes)
        self.cache = self._random_cache(num_blocks)
        table = torch.randperm(num_blocks - 1, device=device).view(num_reqs, -1) + 1
        self.own_table = table.int()  # [N, blocks_per_req]
        self.query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.block_table = torch.zeros_like(self.own_table)
        self.slot_mapping = torch.full((self.max_tokens,), -1, device=device)
        width = layer.head_dim_v or layer.head_dim
        self.query = self._random(layer.num_heads, layer.head_dim)
        self.key = self._random(layer.num_kv_heads, layer.head_dim)
        self.value = None if layer.is_mla else self._random(layer.num_kv_heads, layer.head_dim)
        self.output = torch.zeros(
            self.max_tokens, layer.num_heads, width, dtype=dtype, device=device
        )

    def measure(self, case: ClaimCase) -> float:
        """Capture the case's graph; return its largest error relative to eager runs.

        The sequence lengths grow from 64 to `max_len`.
        """
        length, num_reqs = case.uniform_token_count, self.setup.num_reqs
        num_tokens = self.setup.mixed_tokens if length is None else num_reqs * length
        desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens, num_reqs, length)
        manager = CudaGraphManager("claim", [desc], self.pool)

        def create(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> tuple[Callable[[AttentionState], Tensor], AttentionState]:
            short = [min(64, self.setup.max_len)] * num_reqs
            common = self.fill(desc, self.query_lens(length, num_reqs), short)
            state = self.state(self.builder.build_for_capture(common, desc))
            return lambda state: self.forward(num_tokens, state), state

        manager.capture(create)
        worst = 0.0
        for live, longest in self._growing():
            lens = [max(length or 1, longest - 37 * row) for row in range(live)]
            query_lens = self.query_lens(length, live)
            lens = [max(n, q) for n, q in zip(lens, query_lens, strict=True)]
            common = self.fill(desc, query_lens, lens)
            metadata = self.builder.build(common, desc)
            self.output.fill_(float("nan"))
            if metadata.can_replay:
                manager.run_fullgraph(desc)
            else:
                self.forward(num_tokens, self.state(metadata))
            real = sum(query_lens)
            replayed = self.output[:real].clone()
            eager = common.with_rows(live, real)
            self.forward(real, self.state(self.builder.build(eager)))
            worst = max(worst, self.compare(replayed, self.output[:real]))
        manager.reset()
        return worst

    def _growing(self) -> list[tuple[int, int]]:
        """(number of real requests, longest length) of each replay; some leave padding."""
        longest, full = self.setup.max_len, self.setup.num_reqs
        steps = [(full, 64), (full, 700), (max(1, full - 1), longest // 2), (1, longest)]
        return [(live, min(n, longest)) for live, n in (*steps, (full, longest), (full, 65))]

    def query_lens(self, length: int | None, live: int) -> list[int]:
        """Query lengths of `live` requests: all `length`, or for None one prefill chunk and
        decodes."""
        if length is not None:
            return [length] * live
        rest = self.setup.mixed_tokens - live
        return [rest // 2, *[1] * (live - 1)]

    def fill(
        self, desc: BatchExecutionDescriptor, query_lens: Sequence[int], lens: Sequence[int]
    ) -> CommonAttentionMetadata:
        """Write a batch into the buffers, padded as in a real step."""
        num_reqs, live = self.setup.num_reqs, len(lens)
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
        starts[1 : live + 1] = torch.tensor(query_lens).cumsum(0)
        starts[live + 1 :] = starts[live]
        padded = torch.zeros(num_reqs, dtype=torch.int32)
        padded[:live] = torch.tensor(lens)
        self.query_start_loc.copy_(starts)
        self.seq_lens.copy_(padded)
        self.block_table.zero_()
        self.block_table[:live] = self.own_table[:live]
        rows = torch.arange(live).repeat_interleave(torch.tensor(query_lens))
        within = torch.arange(int(starts[live])) - starts[:-1].long()[rows]
        positions = (padded[:live] - torch.tensor(query_lens))[rows] + within
        size = self.setup.block_size
        blocks = self.own_table[rows, (positions // size).to(self.device)].long()
        self.slot_mapping.fill_(-1)
        offsets = (positions % size).to(self.device)
        self.slot_mapping[: rows.shape[0]] = blocks * size + offsets
        self.query.normal_()
        self.key.normal_()
        if self.value is not None:
            self.value.normal_()
        return CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=desc.num_tokens,
            max_query_len=max(query_lens),
            max_seq_len=self.setup.max_len,
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens,
            seq_lens_cpu_upper_bound=padded,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping[: desc.num_tokens],
        )

    def forward(self, num_tokens: int, state: AttentionState) -> Tensor:
        value = None if self.value is None else self.value[:num_tokens]
        out = state.attend(
            self.layer.layer_id, self.query[:num_tokens], self.key[:num_tokens], value
        )
        return self.output[:num_tokens].copy_(out)

    def state(self, metadata: AttentionMetadata) -> AttentionState:
        """Wrap the metadata in an attention state for the trial's single layer."""
        number = self.layer.layer_id
        return AttentionState(
            [metadata],
            {number: self.layer},
            {number: 0},
            {number: self.cache},
        )

    def _random_cache(self, num_blocks: int) -> Tensor:
        layer, size = self.layer, self.setup.block_size
        shape: tuple[int, ...] = (num_blocks, size, layer.num_kv_heads, layer.head_dim)
        both = torch.randn(shape if layer.is_mla else (2, *shape), device=self.device)
        both = both.to(self.dtype)
        if layer.fp8 is None:
            return both
        slots = torch.arange(num_blocks * size, device=self.device)
        if layer.fp8.paged:
            count = page_bytes(size, layer.fp8.latent, layer.fp8.rotary)
            cache = torch.zeros(
                (num_blocks, 1, 1, count), dtype=layer.cache_dtype, device=self.device
            )
            pages = Pages(cache, slots[None].int(), slots, size, 1, layer.fp8)
            store_rows(both.flatten(0, 1), pages)
            return cache
        row = layer.cache_row(layer.head_dim)
        cache = torch.zeros((*both.shape[:-1], row), dtype=layer.cache_dtype, device=self.device)
        key, value = (both, None) if layer.is_mla else both
        value = None if value is None else value.flatten(0, 1)
        store_kv(key.flatten(0, 1), value, cache, slots, layer.fp8)
        return cache

    def _random(self, heads: int, dim: int) -> Tensor:
        return torch.randn(self.max_tokens, heads, dim, device=self.device).to(self.dtype)
