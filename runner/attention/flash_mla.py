"""FlashMLA (package `sgl-flash-mla`): dense MLA decode on SM90, planned on the device.

A `FlashMLASchedMeta` is empty until its first call, which launches the planning kernel. All layers
of a step share one object, but its plan is valid only for this step's lengths. Every `build`
therefore makes a new one, so that under capture the graph contains the planning (vllm#42444).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ...kernels.attention.store_kv import store_kv
from ..errors import RunnerError
from .base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    BuilderSizes,
    CommonAttentionMetadata,
)
from .compressed import CompressedBuilder
from .flash_mla_listed import ListedPass
from .flash_mla_sparse import SparsePass, problem
from .triton import TritonMetadata, max_query_len

PAGE = 64
ROW, ROW_V = 576, 512  # a cached row, and the part of it that is V
_MAX_UNIFORM_LEN = 16


class FlashMLAMetadata(AttentionMetadata):
    """Attention of a batch in which every request has query length L; M* = N* x L token rows."""

    def __init__(
        self,
        common: CommonAttentionMetadata,
        query_len: int,
        create_schedule: Callable[[], Any],
        decode: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        self._common = common
        self._query_len = query_len
        self._create_schedule = create_schedule
        self._decode = decode
        # A plan also depends on the number of heads, which the kernel does not check (vllm#39775).
        self._schedules: dict[int, Any] = {}  # by num_heads
        self._lens: Tensor | None = None  # [N*] int32

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        common, length = self._common, self._query_len
        if key is not None:
            store_kv(key, None, kv_cache, common.slot_mapping)
        if self._lens is None:
            # The kernel is undefined for padded requests, which have length 0: let them read L rows
            # of the null block. This runs inside the graph, because lengths change on the device.
            self._lens = common.seq_lens.clamp(min=length)
        if layer.num_heads not in self._schedules:
            self._schedules[layer.num_heads] = self._create_schedule()
        num_reqs = common.num_reqs
        out, _ = self._decode(
            query.reshape(num_reqs, length, layer.num_heads, ROW),
            kv_cache,
            common.block_table,
            self._lens,
            ROW_V,
            self._schedules[layer.num_heads],
            softmax_scale=layer.scale,
            causal=True,
            use_legacy=True,
        )
        return out.view(num_reqs * length, layer.num_heads, ROW_V)


class FlashMLABuilder(AttentionBuilder):
    """Runs uniform batches of short queries on FlashMLA, and all others on the Triton kernel.

    Short means at most 16 tokens per request; longer queries are prefills.
    """

    supports = AttentionCGSupport.UNIFORM_BATCH
    builds_on_device = True  # the first call of each build's schedule plans it on the device

    def __init__(
        self,
        create_schedule: Callable[[], Any],
        decode: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        self._create_schedule = create_schedule
        self._decode = decode

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> AttentionMetadata:
        length = uniform_query_len(common, desc)
        if length is None or length > _MAX_UNIFORM_LEN:
            return TritonMetadata(common, max_query_len(common, desc))
        return FlashMLAMetadata(common, length, self._create_schedule, self._decode)


def uniform_query_len(
    common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None
) -> int | None:
    """The query length that all rows share, or None: a FULL graph's own, else from the host."""
    if desc is not None and desc.mode is CUDAGraphMode.FULL:
        return desc.uniform_token_count
    length, num_reqs = common.max_query_len, common.num_reqs
    if length * num_reqs != common.num_actual_tokens:
        return None
    starts = common.query_start_loc_cpu
    return length if bool((starts[1:] - starts[:-1] == length).all()) else None


class FlashMLABackend(AttentionBackend):
    """Runs DeepSeek's latent attention on an H100 or H200."""

    name = "flash_mla"

    @classmethod
    def block_size(cls, wanted: int) -> int:
        return PAGE

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        for layer in layers:
            if layer.is_compressed:
                reason = problem(layer)
                if reason is not None:
                    return reason
                continue
            if not layer.is_mla or (layer.head_dim, layer.head_dim_v) != (ROW, ROW_V):
                return (
                    f"it only supports latent attention with rows of {ROW}, which this model lacks"
                )
            if layer.fp8 is not None:
                return (
                    "its kernel for dense attention does not read the packed fp8 rows of "
                    "--kv-cache-dtype fp8; use --attention-backend triton"
                )
            if layer.sliding_window or layer.softcap or layer.sinks is not None:
                return "it does not support sliding windows, soft caps or sinks"
        if device.type != "cuda":
            return "it needs a CUDA device"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return f"it needs an SM90 GPU; this one is {torch.cuda.get_device_name(device)}"
        return _missing()

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> AttentionBuilder:
        if sizes.dtype is not torch.bfloat16:
            raise RunnerError(f"FlashMLA needs --dtype bfloat16, not {sizes.dtype}.")
        block_size = sizes.block_size
        module = importlib.import_module("flash_mla")
        if layers[0].is_compressed and layers[0].fp8 is not None:
            create, decode = module.get_mla_metadata, module.flash_mla_with_kvcache
            return CompressedBuilder(block_size, lambda: ListedPass(lambda: create()[0], decode))
        if layers[0].is_compressed:
            forward = module.flash_mla_sparse_fwd
            return CompressedBuilder(block_size, lambda: SparsePass(forward))
        if block_size != PAGE:
            raise RunnerError(f"FlashMLA needs --block-size {PAGE}, not {block_size}.")
        return FlashMLABuilder(lambda: module.get_mla_metadata()[0], module.flash_mla_with_kvcache)


def _missing() -> str | None:
    """Why the package cannot be used, or None. (PyPI's `flash-mla` is a stub without kernels.)"""
    try:
        module = importlib.import_module("flash_mla")
    except ImportError as error:
        return f"the package sgl-flash-mla cannot be imported ({error})"
    call = getattr(module, "flash_mla_with_kvcache", None)
    if call is None or "use_legacy" not in inspect.signature(call).parameters:
        return "the installed flash_mla is not sgl-flash-mla 1.0, the package with SM90 kernels"
    if not module.has_legacy():
        return "the installed sgl-flash-mla was built without its SM90 kernels"
    return None
