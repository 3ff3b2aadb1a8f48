"""The Triton attention back end: decode, verify and prefill; graphs fit any batch.

It keeps no state between steps, so its metadata is a set of views. A batch that mixes decodes and
prefills gets a launch for each kind, in which the programs of the other kind return at once. Which
kind a request is, the device finds from its query length, so a graph may hold both launches.
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
    BuilderSizes,
    CommonAttentionMetadata,
    Rotary,
)
from .compressed import CompressedBuilder

_LEAST_DECODES = 8  # outside a graph, fewer decodes beside prefills do not pay for their own launch
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
        short_len: int = 0,
        fixed: bool = False,  # as in `PagedRows`
    ) -> None:
        self._rows = PagedRows(
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            max_query_len,
            common.slot_mapping,
            arrivals,
            short_len,
            fixed=fixed,
        )

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
    """Builds views only, since the kernels read the step buffers directly.

    `arrivals` are counters, zero between launches, by which the programs of the fused kernel find
    out which of them finishes last. With `fixed`, a row's bits do not depend on other rows.
    """

    supports = AttentionCGSupport.ALWAYS
    builds_on_device = True

    def __init__(self, arrivals: Tensor | None = None, fixed: bool = False) -> None:
        self._arrivals, self._fixed = arrivals, fixed

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> TritonMetadata:
        longest, uniform = max_query_len(common, desc), None
        if self._fixed:  # decodes and prompts have one kind of launch
            return TritonMetadata(common, longest, fixed=True)
        if desc is None or desc.mode is not CUDAGraphMode.FULL:
            short = _short_len(common)
        else:
            uniform = desc.uniform_token_count
            short = 0 if uniform else common.max_decode_len
        if short >= longest:  # every request is a decode
            longest, short = short, 0
        # Other launches have queries of any length, for which the fused kernel has too many forms.
        fuses = uniform or short or longest <= common.max_decode_len
        return TritonMetadata(common, longest, self._arrivals if fuses else None, short)


def _short_len(common: CommonAttentionMetadata) -> int:
    """The bound on the query lengths of decodes that get a launch of their own outside a graph.

    It is 0 if the batch has too few of them. Reads query lengths on the host.
    """
    starts = common.query_start_loc_cpu.numpy()
    lengths = starts[1:] - starts[:-1]
    decodes = lengths[(lengths > 0) & (lengths <= common.max_decode_len)]
    if len(decodes) == 0 or (len(decodes) < _LEAST_DECODES and len(decodes) < len(lengths)):
        return 0
    return 1 if decodes.max() == 1 else common.max_decode_len


def _listed_row_problem(layer: AttentionLayer) -> str | None:
    """Why the kernels for listed rows cannot read a layer's, or None."""
    if layer.sliding_window is not None and not layer.attends:
        return None  # merely stored
    size = layer.head_dim_v or layer.head_dim
    rest = layer.head_dim - size
    if size & (size - 1):
        return f"compressed caches need rows of a power of two, not {size}"
    if rest and (rest < 16 or rest & (rest - 1)):
        return f"the rotary part of MLA must have 16, 32, 64, ... values, not {rest}"
    return None


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
                reason = _listed_row_problem(layer)
                if reason is not None:
                    return reason
            elif layer.is_mla:
                rest = layer.head_dim - (layer.head_dim_v or 0)
                if rest < 16 or rest & (rest - 1):  # must be a tile of the kernel
                    return f"the rotary part of MLA must have 16, 32, 64, ... values, not {rest}"
            elif not _MIN_HEAD_DIM <= layer.head_dim <= _MAX_HEAD_DIM:
                sizes = f"{_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}"
                return f"it supports head sizes of {sizes}, not {layer.head_dim}"
        return None

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> AttentionBuilder:
        if layers[0].is_compressed:
            return CompressedBuilder(sizes.block_size)
        if self.batch_invariant:
            return TritonBuilder(fixed=True)
        count = sizes.max_num_reqs * layers[0].num_kv_heads
        return TritonBuilder(torch.zeros(count, dtype=torch.int32, device=sizes.device))
