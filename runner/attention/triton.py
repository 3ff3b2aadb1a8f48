"""The Triton attention back end: one kernel for decode, verify and prefill; graphs fit any batch.

It keeps no state between steps, so its metadata is a set of views. A batch that mixes decodes and
prefills is split on the host, and each part gets a launch of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ...kernels.attention.paged_attention import paged_attention
from ...kernels.attention.paged_rows import PagedRows
from ...kernels.attention.rotary_attention import rotary_attention
from ...kernels.attention.store_kv import store_kv
from ...kernels.device import card_of
from .base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    CommonAttentionMetadata,
    Rotary,
)
from .compressed import CompressedBuilder

# A mixed batch gets two launches if it begins with this number of decodes, of up to so many tokens.
_LEAST_DECODES, _DECODE_TOKENS = 8, 16
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 512  # 16 is the smallest tile of a tensor core
_FP8_CAPABILITY = (8, 9)  # the first with instructions that widen e4m3


class TritonMetadata(AttentionMetadata):
    """Views of the step buffers. A graph bakes their addresses and the bound on query lengths."""

    fuses_rotation = True

    def __init__(
        self,
        common: CommonAttentionMetadata,
        max_query_len: int,
        arrivals: Tensor | None = None,  # [>= N* x kv heads] int32 zeros; see `TritonBuilder`
        parts: tuple[PagedRows, PagedRows] | None = None,
    ) -> None:
        self._rows = _paged_rows(common, max_query_len, arrivals, parts)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        if key is not None:
            store_kv(key, value, kv_cache, self._rows.slot_mapping, layer.fp8)
        return paged_attention(query, kv_cache, self._rows, layer)

    def rotate_and_attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        if key is None or value is None:
            return super().rotate_and_attend(layer, query, key, value, kv_cache, rotary, out)
        return rotary_attention(query, key, value, rotary, kv_cache, self._rows, layer, out)


class TritonBuilder(AttentionBuilder):
    """Builds views only, since the kernel reads the step buffers directly; a batch that mixes
    decodes and prefills is split on the host (`mixed_parts`).

    `arrivals` are counters, zero between launches, by which the programs of the fused kernel find
    out which of them finishes last.
    """

    supports = AttentionCGSupport.ALWAYS
    builds_on_device = True

    def __init__(self, arrivals: Tensor | None = None) -> None:
        self._arrivals = arrivals
        self._longest = 1  # the longest query of a uniform batch that a graph holds

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> TritonMetadata:
        is_full = desc is not None and desc.mode is CUDAGraphMode.FULL
        uniform = None if desc is None else desc.uniform_token_count
        arrivals = None
        if is_full and uniform is not None:
            arrivals, self._longest = self._arrivals, max(self._longest, uniform)
        # Other steps have queries of any length, which would need too many variants of the fused
        # kernel; only decodes among them are like those of graphs.
        parts = None if is_full else mixed_parts(common, self._arrivals, self._longest)
        return TritonMetadata(common, max_query_len(common, desc), arrivals, parts)


def _paged_rows(
    common: CommonAttentionMetadata,
    max_query_len: int,
    arrivals: Tensor | None = None,
    parts: tuple[PagedRows, PagedRows] | None = None,
) -> PagedRows:
    return PagedRows(
        common.block_table,
        common.query_start_loc,
        common.seq_lens,
        max_query_len,
        common.slot_mapping,
        arrivals,
        parts,
    )


def mixed_parts(
    common: CommonAttentionMetadata, arrivals: Tensor | None = None, longest_fused: int = 1
) -> tuple[PagedRows, PagedRows] | None:
    """Split a batch of decodes and prefills into the former and the rest.

    The decodes get `arrivals` if none has more than `longest_fused` tokens. Decodes come first in a
    batch. Returns None for other batches, and for one with so few decodes that a launch of their
    own would cost more than it saves. Reads query lengths on the host.
    """
    if common.max_query_len <= _DECODE_TOKENS or common.num_reqs <= _LEAST_DECODES:
        return None
    starts = common.query_start_loc_cpu.numpy()
    lengths = starts[1:] - starts[:-1]
    longer = lengths > max(1, int(lengths[0]))
    num_reqs = int(longer.argmax())  # 0 if no request is longer than the first
    if num_reqs < _LEAST_DECODES or lengths[0] > _DECODE_TOKENS:
        return None
    num_tokens = int(starts[num_reqs])
    longest = int(lengths[:num_reqs].max())
    if longest > longest_fused:
        arrivals = None
    early = _paged_rows(common.with_rows(num_reqs, num_tokens), longest, arrivals)
    late = PagedRows(
        _aligned(common.block_table[num_reqs:]),
        common.query_start_loc[num_reqs:] - num_tokens,
        _aligned(common.seq_lens[num_reqs:]),
        common.max_query_len,
        common.slot_mapping[num_tokens:],
    )
    return early, late


def _aligned(rows: Tensor) -> Tensor:
    """The tensor, or a copy at an address that suits the kernel compiled for whole batches."""
    if rows.data_ptr() % 16 == 0:
        return rows
    copy = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device)
    return copy.copy_(rows)


def max_query_len(common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None) -> int:
    """The bound on query lengths that a launch may bake: for a FULL graph the descriptor's."""
    if desc is None or desc.mode is not CUDAGraphMode.FULL:
        return common.max_query_len
    return desc.uniform_token_count or desc.num_tokens


class TritonBackend(AttentionBackend):
    """Runs attention by Triton kernels on a CUDA device, and in tests on the CPU by the references.

    It supports head sizes of 16 to 512, and MLA with a rotary part of 16, 32, 64, ... values.
    """

    name = "triton"

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        card = card_of(device)
        if card is not None and card.capability < _FP8_CAPABILITY:
            if any(layer.fp8 is not None for layer in layers):
                return (
                    "an fp8 KV cache needs a GPU of compute capability 8.9 or later (Ada, Hopper), "
                    f"and {card.name} has {card.capability[0]}.{card.capability[1]}; "
                    "use --kv-cache-dtype auto"
                )
        for layer in layers:
            if layer.is_compressed:
                is_tile = layer.attends or layer.entry_tokens > 1  # and not merely stored
                if is_tile and layer.head_dim & (layer.head_dim - 1):
                    return f"compressed caches need rows of a power of two, not {layer.head_dim}"
            elif layer.is_mla:
                rest = layer.head_dim - (layer.head_dim_v or 0)
                if rest < 16 or rest & (rest - 1):  # must be a tile of the kernel
                    return f"the rotary part of MLA must have 16, 32, 64, ... values, not {rest}"
            elif not _MIN_HEAD_DIM <= layer.head_dim <= _MAX_HEAD_DIM:
                sizes = f"{_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}"
                return f"it supports head sizes of {sizes}, not {layer.head_dim}"
        return None

    def create_builder(
        self,
        layers: Sequence[AttentionLayer],
        block_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionBuilder:
        if layers[0].is_compressed:
            return CompressedBuilder(block_size, in_graphs=True)
        count = max_num_reqs * layers[0].num_kv_heads
        return TritonBuilder(torch.zeros(count, dtype=torch.int32, device=device))
